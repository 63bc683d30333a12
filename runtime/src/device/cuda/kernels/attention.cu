// Causal attention with grouped queries, in the manner of FlashAttention: scores are never kept.
//
// A warp has one row: of queries in `attention` and `attention_grad_q`, of keys in
// `attention_grad_kv`. Its lanes take 32 rows of the other side at a time, a score each, and then
// 32 elements of the head dim each, so that a warp meets but twice for 32 scores. Positions, not
// places, say who sees whom; so sequences in zigzag order and shards of keys that go around a ring
// are no other case. No atomic additions: the order of a sum is that of the rows.
//
// n = batch, queries, kv heads, groups, head dim, keys, valid queries, valid keys, first stored
// query, first stored key, chunk and ranks of the order, whether the results of an earlier part
// are continued; from 13 on the mask of dropout: whether there is one, first sample, kv head and
// group, lengths of queries, kv heads, groups and keys of the whole tensor, and four words of the
// key; 25 to 31 are those of scores.cuh. f = scale of the scores, dropout probability, what keeps
// the mean, cap of the scores.

#define LANES 32
#define WARPS 4
#define MOST 8 // elements of a head that a lane has: head dims up to 256

struct Sizes {
    i64 batch, queries, heads, groups, dim, keys, valid_queries, valid_keys;
    float scale;
    i64 value; // width of values and results

    // Whether a query sees a key.
    __device__ __forceinline__ bool sees(const Args &a, i64 query, i64 key) const {
        return key <= query && (!HAS_WINDOW || query - key < a.n[26]) && sees_block(a, query, key);
    }
    // The score of a product over this distance, and what its slope by the product is times.
    __device__ __forceinline__ float score(const Args &a, float product, i64 distance, float slope,
                                           float &rate) const {
        float s = scale * product;
        rate = 1.0f;
        if (HAS_CAP) {
            const float cap = (float)a.f[3], t = tanhf(s / cap);
            s = cap * t;
            rate = 1.0f - t * t;
        }
        if (HAS_SLOPES) s -= slope * (float)distance;
        return s;
    }
};

DEVICE Sizes sizes(const Args &a) {
    Sizes s = {a.n[0], a.n[1], a.n[2], a.n[3], a.n[4], a.n[5], a.n[6], a.n[7], (float)a.f[0],
               a.n[HAS_VALUES ? 25 : 4]};
    return s;
}
// Whether a warp may leave out 32 pairs: where blocks are seen, no lane's query sees its key.
DEVICE bool is_unseen(bool sees) { return HAS_BLOCKS && !__any_sync(0xffffffffu, sees); }
DEVICE i64 query_position(const Args &a, i64 i) { return position(a.n[8] + i, a.n[10], a.n[11]); }
DEVICE i64 key_position(const Args &a, i64 j) { return position(a.n[9] + j, a.n[10], a.n[11]); }

// Where the keys of a query's window begin, or whole LANES before: sums have the same order then.
DEVICE i64 first_key(const Args &a, i64 query) {
    const i64 j = query - a.n[26] + 1 - a.n[9];
    return HAS_WINDOW && a.n[10] == 0 && j > 0 ? j / LANES * LANES : 0;
}

// The factor of a probability; elements are named by sample, positions and heads.
DEVICE float kept(const Args &a, i64 b, i64 kv, i64 g, i64 query, i64 key) {
    if (!a.n[13]) return 1.0f;
    const i64 *first = a.n + 14, *lens = a.n + 17;
    u64 row = ((u64)(first[0] + b) * lens[0] + query) * lens[1] + first[1] + kv;
    u64 element = (row * lens[2] + first[2] + g) * lens[3] + key;
    return (double)uniform(element, a.n + 21) < a.f[1] ? 0.0f : (float)a.f[2];
}

template <class L, class R> DEVICE float dot(L l, i64 at_l, R r, i64 at_r, i64 n) {
    float sum = 0;
    for (i64 d = 0; d < n; d++) sum += l[at_l + d] * r[at_r + d];
    return sum;
}

// q, k, v and, where it continues, o and lse, to o and lse.
KERNEL(attention) {
    In<T0> q(a.x[0]);
    In<T1> k(a.x[1]);
    In<T2> v(a.x[2]);
    Out<O0> o(a.y[0]);
    Out<O1> lse(a.y[1]);
    __shared__ float probabilities[WARPS][LANES];
    const Sizes s = sizes(a);
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const i64 row = (i64)blockIdx.x * WARPS + warp;
    if (row >= s.batch * s.queries * s.heads * s.groups) return;
    const i64 g = row % s.groups, kv = row / s.groups % s.heads;
    const i64 i = row / s.groups / s.heads % s.queries, b = row / s.groups / s.heads / s.queries;
    const i64 query = query_position(a, i);
    float most = -INFINITE, sum = 0, acc[MOST];
    for (int e = 0; e < MOST; e++) acc[e] = 0.0f;
    if (a.n[12]) {
        In<T3> o_before(a.x[3]);
        In<T4> lse_before(a.x[4]);
        most = lse_before[row];
        sum = most == -INFINITE ? 0.0f : 1.0f;
        for (int e = 0; e < MOST; e++) {
            i64 d = lane + LANES * e;
            if (d < s.value) acc[e] = o_before[row * s.value + d];
        }
    }
    // By position nothing is visible after the query.
    i64 n_keys = s.valid_keys;
    if (a.n[10] == 0 && query - a.n[9] + 1 < n_keys) n_keys = query - a.n[9] + 1;
    const float slope = slope_of(a, kv, g);
    for (i64 j0 = first_key(a, query); j0 < n_keys; j0 += LANES) {
        const i64 j = j0 + lane;
        const i64 key = key_position(a, j);
        float score = -INFINITE, rate;
        const bool sees = j < n_keys && s.sees(a, query, key);
        if (is_unseen(sees)) continue;
        if (sees) {
            const i64 at = ((b * s.keys + j) * s.heads + kv) * s.dim;
            score = s.score(a, dot(q, row * s.dim, k, at, s.dim), query - key, slope, rate);
        }
        const float now = larger(warp_max(score), most);
        if (now == -INFINITE) continue;
        float p = score == -INFINITE ? 0.0f : expf(score - now);
        const float before = most == -INFINITE ? 0.0f : expf(most - now);
        sum = sum * before + warp_sum(p);
        most = now;
        if (p != 0.0f) p *= kept(a, b, kv, g, query, key);
        probabilities[warp][lane] = p;
        __syncwarp();
        const int n = n_keys - j0 < LANES ? (int)(n_keys - j0) : LANES;
        for (int e = 0; e < MOST; e++) {
            i64 d = lane + LANES * e;
            if (d >= s.value) break;
            float total = acc[e] * before;
            for (int t = 0; t < n; t++)
                total += probabilities[warp][t] * v[((b * s.keys + j0 + t) * s.heads + kv) * s.value + d];
            acc[e] = total;
        }
        __syncwarp();
    }
    for (int e = 0; e < MOST; e++) {
        i64 d = lane + LANES * e;
        if (d < s.value) o.set(row * s.value + d, sum == 0.0f ? 0.0f : acc[e] / sum);
    }
    if (lane == 0) lse.set(row, sum == 0.0f ? -INFINITE : most + logf(sum));
}

// The product of a row of o and do, less the gradient of its log-sum-exp where it has one.
DEVICE float delta_of(const Args &a, float product, i64 row) {
    if (!HAS_LSE_GRADIENT) return product;
    In<T6> d_lse(a.x[6]);
    return product - d_lse[row];
}

// q, k, v, o, lse, do, the gradient of lse where it has one, and, where it continues, dq, to dq.
KERNEL(attention_grad_q) {
    In<T0> q(a.x[0]);
    In<T1> k(a.x[1]);
    In<T2> v(a.x[2]);
    In<T3> o(a.x[3]);
    In<T4> lse(a.x[4]);
    In<T5> d_o(a.x[5]);
    Out<O0> dq(a.y[0]);
    __shared__ float slopes[WARPS][LANES];
    const Sizes s = sizes(a);
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const i64 row = (i64)blockIdx.x * WARPS + warp;
    if (row >= s.batch * s.queries * s.heads * s.groups) return;
    const i64 g = row % s.groups, kv = row / s.groups % s.heads;
    const i64 i = row / s.groups / s.heads % s.queries, b = row / s.groups / s.heads / s.queries;
    const i64 query = query_position(a, i);
    const float norm = lse[row];
    float acc[MOST], delta = 0;
    for (int e = 0; e < MOST; e++) {
        i64 d = lane + LANES * e;
        acc[e] = 0.0f;
        if (d < s.value) delta += o[row * s.value + d] * d_o[row * s.value + d];
    }
    delta = delta_of(a, warp_sum(delta), row);
    i64 n_keys = s.valid_keys;
    if (a.n[10] == 0 && query - a.n[9] + 1 < n_keys) n_keys = query - a.n[9] + 1;
    if (norm == -INFINITE) n_keys = 0;
    const float falls = slope_of(a, kv, g);
    for (i64 j0 = first_key(a, query); j0 < n_keys; j0 += LANES) {
        const i64 j = j0 + lane;
        const i64 key = key_position(a, j);
        float slope = 0.0f;
        const bool sees = j < n_keys && s.sees(a, query, key);
        if (is_unseen(sees)) continue;
        if (sees) {
            const i64 at = (b * s.keys + j) * s.heads + kv;
            float rate, product = dot(q, row * s.dim, k, at * s.dim, s.dim);
            float p = expf(s.score(a, product, query - key, falls, rate) - norm);
            float dp = dot(d_o, row * s.value, v, at * s.value, s.value);
            slope = p * (kept(a, b, kv, g, query, key) * dp - delta) * rate;
        }
        slopes[warp][lane] = slope;
        __syncwarp();
        const int n = n_keys - j0 < LANES ? (int)(n_keys - j0) : LANES;
        for (int e = 0; e < MOST; e++) {
            i64 d = lane + LANES * e;
            if (d >= s.dim) break;
            for (int t = 0; t < n; t++)
                acc[e] += slopes[warp][t] * k[((b * s.keys + j0 + t) * s.heads + kv) * s.dim + d];
        }
        __syncwarp();
    }
    for (int e = 0; e < MOST; e++) {
        i64 d = lane + LANES * e;
        if (d >= s.dim) break;
        float before = 0.0f;
        if (a.n[12]) {
#if HAS_LSE_GRADIENT
            In<T7> dq_before(a.x[7]);
#else
            In<T6> dq_before(a.x[6]);
#endif
            before = dq_before[row * s.dim + d];
        }
        dq.set(row * s.dim + d, before + s.scale * acc[e]);
    }
}

// The same operands to dk and dv.
KERNEL(attention_grad_kv) {
    In<T0> q(a.x[0]);
    In<T1> k(a.x[1]);
    In<T2> v(a.x[2]);
    In<T3> o(a.x[3]);
    In<T4> lse(a.x[4]);
    In<T5> d_o(a.x[5]);
    Out<O1> dk(a.y[1]);
    Out<O2> dv(a.y[2]);
    __shared__ float slopes[WARPS][LANES], probabilities[WARPS][LANES];
    const Sizes s = sizes(a);
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const i64 row = (i64)blockIdx.x * WARPS + warp;
    if (row >= s.batch * s.keys * s.heads) return;
    const i64 kv = row % s.heads, j = row / s.heads % s.keys, b = row / s.heads / s.keys;
    const i64 key = key_position(a, j);
    float acc_k[MOST], acc_v[MOST];
    for (int e = 0; e < MOST; e++) acc_k[e] = acc_v[e] = 0.0f;
    const i64 n_queries = j < s.valid_keys ? s.valid_queries : 0;
    // By position nothing before the key sees it.
    i64 i0 = 0;
    if (a.n[10] == 0 && key > a.n[8]) i0 = (key - a.n[8]) / LANES * LANES;
    // Nor does what is a window behind it.
    i64 end = n_queries;
    if (HAS_WINDOW && a.n[10] == 0 && key + a.n[26] - a.n[8] < end) end = key + a.n[26] - a.n[8];
    for (; i0 < end; i0 += LANES)
        for (i64 g = 0; g < s.groups; g++) {
            const i64 i = i0 + lane;
            const i64 query = query_position(a, i);
            float slope = 0.0f, p = 0.0f;
            const bool sees = i < n_queries && s.sees(a, query, key);
            if (is_unseen(sees)) continue;
            if (sees) {
                const i64 of_q = ((b * s.queries + i) * s.heads + kv) * s.groups + g;
                const float norm = lse[of_q];
                if (norm != -INFINITE) {
                    float rate, product = dot(q, of_q * s.dim, k, row * s.dim, s.dim);
                    p = expf(s.score(a, product, query - key, slope_of(a, kv, g), rate) - norm);
                    float dp = dot(d_o, of_q * s.value, v, row * s.value, s.value);
                    float delta = dot(d_o, of_q * s.value, o, of_q * s.value, s.value);
                    float keep = kept(a, b, kv, g, query, key);
                    slope = p * (keep * dp - delta_of(a, delta, of_q)) * rate;
                    p *= keep;
                }
            }
            slopes[warp][lane] = slope;
            probabilities[warp][lane] = p;
            __syncwarp();
            const int n = n_queries - i0 < LANES ? (int)(n_queries - i0) : LANES;
            for (int e = 0; e < MOST; e++) {
                i64 d = lane + LANES * e;
                if (d >= s.dim && d >= s.value) break;
                for (int t = 0; t < n; t++) {
                    i64 of_q = ((b * s.queries + i0 + t) * s.heads + kv) * s.groups + g;
                    if (d < s.dim) acc_k[e] += slopes[warp][t] * q[of_q * s.dim + d];
                    if (d < s.value) acc_v[e] += probabilities[warp][t] * d_o[of_q * s.value + d];
                }
            }
            __syncwarp();
        }
    for (int e = 0; e < MOST; e++) {
        i64 d = lane + LANES * e;
        if (d < s.dim) dk.set(row * s.dim + d, s.scale * acc_k[e]);
        if (d < s.value) dv.set(row * s.value + d, acc_v[e]);
    }
}
