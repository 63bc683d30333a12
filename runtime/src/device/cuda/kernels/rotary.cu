// Rotary position embedding, rotate-half: n = elements, sequence, heads, head dim, first stored
// row, chunk and ranks of its order, whether it turns back, pairs of a head that turn, the first;
// table = their frequencies; f = the factor of sines and cosines. The elements behind them stay as
// they are.
KERNEL(rotary) {
    In<T0> x(a.x[0]);
    Out<O0> y(a.y[0]);
    const i64 sequence = a.n[1], heads = a.n[2], dim = a.n[3], half = a.n[8];
    FOR_EACH(i, a.n[0] / 2) {
        i64 pair = i % (dim / 2), head = i / (dim / 2);
        if (pair >= half) {
            i64 at = head * dim + 2 * pair;
            y.set(at, x[at]);
            y.set(at + 1, x[at + 1]);
            continue;
        }
        i64 row = a.n[4] + head / heads % sequence;
        float angle = (float)position(row, a.n[5], a.n[6]) * a.table[pair];
        float by = (float)a.f[0];
        float c = by * cosf(angle), s = by * (a.n[7] ? -sinf(angle) : sinf(angle));
        float first = x[head * dim + pair], second = x[head * dim + half + pair];
        y.set(head * dim + pair, first * c - second * s);
        y.set(head * dim + half + pair, second * c + first * s);
    }
}
