// How an attention's scores differ from scaled products of queries and keys, as switches of the
// compiler, each 0 or 1. A file is compiled for what it is used with, so that a kernel without one
// of these has no code for it.
//
// HAS_WINDOW: a query sees the last n[26] positions, its own among them.
// HAS_BLOCKS: a query sees some blocks of positions: those near it and those that all see. n[27] are
// the tokens of a block, n[28] those of all local ones, which are the whole stretch that a query is
// in where n[29] is not 0, else the last ones; positions before n[30], and those of a stretch from
// n[31] on, are seen by all. The kernels for tensor cores have no blocks.
// HAS_CAP: a score s becomes f[3] tanh(s / f[3]).
// HAS_SLOPES: a score falls with the distance from key to query, by the slope of its head.
// HAS_VALUES: values and results are n[25] elements wide, not as wide as keys.
// HAS_LSE_GRADIENT: the log-sum-exp has a gradient too, which is operand 6 of the gradients.

#ifndef HAS_WINDOW
#define HAS_WINDOW 0
#endif
#ifndef HAS_BLOCKS
#define HAS_BLOCKS 0
#endif
#ifndef HAS_CAP
#define HAS_CAP 0
#endif
#ifndef HAS_SLOPES
#define HAS_SLOPES 0
#endif
#ifndef HAS_VALUES
#define HAS_VALUES 0
#endif
#ifndef HAS_LSE_GRADIENT
#define HAS_LSE_GRADIENT 0
#endif

// Whether a query sees the block of a key that does not stand behind it.
DEVICE bool sees_block(const Args &a, i64 query, i64 key) {
    if (!HAS_BLOCKS) return true;
    const i64 size = a.n[27], stretch = a.n[28];
    const i64 near = a.n[29] ? query / stretch * stretch : query / size * size - (stretch - size);
    return key >= near || key < a.n[30] || key % stretch >= a.n[31];
}

// Whether a score is more than a scaled product.
#define IS_BENT (HAS_CAP || HAS_SLOPES)

// The slope of a head of this call, by its place among the heads of the whole model: `alibi_slope`
// of the crate `ir`. Numbers 15 and 16 are its first ones of keys and of a group, 18 and 19 how many
// there are.
DEVICE float slope_of(const Args &a, i64 kv, i64 g) {
    if (!HAS_SLOPES) return 0.0f;
    const i64 head = (a.n[15] + kv) * a.n[19] + a.n[16] + g, heads = a.n[18] * a.n[19];
    i64 n = 1; // the largest power of two that is no larger
    while (2 * n <= heads) n *= 2;
    const i64 twice = head < n ? 2 * (head + 1) : 2 * (head - n) + 1;
    return exp2f(-4.0f * (float)twice / (float)n);
}
