// Rotary position embedding, rotate-half.

// Cosines and sines of the angles by which pairs turn, one after the other, for stored rows from
// `first` on: n = numbers of pairs of all rows, pairs of a head that turn, first stored row, chunk
// and ranks of its order, whether it turns back; table = their frequencies; f = the factor of sines
// and cosines.
KERNEL(rotary_angles) {
    Out<f32> y(a.y[0]);
    const float by = (float)a.f[0];
    FOR_EACH(i, a.n[0]) {
        i64 pair;
        const i64 row = a.n[2] + divide(i, a.n[1], pair);
        const float angle = (float)position(row, a.n[3], a.n[4]) * a.table[pair];
        y.set(2 * i, by * cosf(angle));
        y.set(2 * i + 1, by * (a.n[5] ? -sinf(angle) : sinf(angle)));
    }
}

// Heads that a thread turns by the same angles.
#define HEADS 4

// x, angles to y: n = elements, sequence, heads, head dim, pairs of a head that turn, the first.
// The elements behind them stay as they are.
KERNEL(rotary) {
    In<T0> x(a.x[0]);
    In<f32> angles(a.x[1]);
    Out<O0> y(a.y[0]);
    const i64 sequence = a.n[1], heads = a.n[2], dim = a.n[3], half = a.n[4];
    if (WIDE) {
        // A thread has eight pairs, or eight elements that stay, of some heads of a row.
        const i64 turning = half / 8, places = turning + (dim - 2 * half) / 8;
        const i64 groups = (heads + HEADS - 1) / HEADS;
        FOR_EACH(i, a.n[0] / (heads * dim) * groups * places) {
            i64 place, group, stored;
            const i64 row = divide(divide(i, places, place), groups, group);
            const i64 left = heads - group * HEADS, at = (row * heads + group * HEADS) * dim;
            if (place >= turning) {
                const i64 c = at + 2 * half + 8 * (place - turning);
#pragma unroll
                for (int k = 0; k < HEADS; k++) {
                    if (k >= left) break;
                    float v[8];
                    load8(x, c + k * dim, v);
                    store8(y, c + k * dim, v);
                }
                continue;
            }
            divide(row, sequence, stored);
            float turns[16], v[8], w[8];
            load8(angles, (stored * half + 8 * place) * 2, turns);
            load8(angles, (stored * half + 8 * place) * 2 + 8, turns + 8);
            const i64 c = at + 8 * place;
            Eight<T0> first[HEADS], second[HEADS];
#pragma unroll
            for (int k = 0; k < HEADS; k++)
                if (k < left) {
                    first[k] = take8(x, c + k * dim);
                    second[k] = take8(x, c + k * dim + half);
                }
#pragma unroll
            for (int k = 0; k < HEADS; k++)
                if (k < left) {
                    widen8(first[k], v);
                    widen8(second[k], w);
                    for (int j = 0; j < 8; j++) {
                        const float cosine = turns[2 * j], sine = turns[2 * j + 1], was = v[j];
                        v[j] = was * cosine - w[j] * sine;
                        w[j] = w[j] * cosine + was * sine;
                    }
                    store8(y, c + k * dim, v);
                    store8(y, c + k * dim + half, w);
                }
        }
        return;
    }
    FOR_EACH(i, a.n[0] / 2) {
        i64 pair, of_row, stored;
        const i64 head = divide(i, dim / 2, pair), at = head * dim;
        if (pair >= half) {
            y.raw(at + 2 * pair, x.raw(at + 2 * pair));
            y.raw(at + 2 * pair + 1, x.raw(at + 2 * pair + 1));
            continue;
        }
        divide(divide(head, heads, of_row), sequence, stored);
        const float c = angles[2 * (stored * half + pair)];
        const float s = angles[2 * (stored * half + pair) + 1];
        const float first = x[at + pair], second = x[at + half + pair];
        y.set(at + pair, first * c - second * s);
        y.set(at + half + pair, second * c + first * s);
    }
}
