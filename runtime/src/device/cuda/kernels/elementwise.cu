// Functions of elements, and of where they stand.

// y = f(x): n = elements, function; f = factor.
JOINED_KERNEL(unary) {
    In<T0> x(a.x[0]);
    Out<O0> y(a.y[0]);
    const int f = (int)a.n[1];
    const float by = (float)a.f[0];
    const i64 n = a.n[0];
    float v[8];
    if (WIDE) {
        FOR_MY_PAIRS(first, n / 8) {
            Eight<T0> from[AT_ONCE];
            FOR_BOTH(k, i, first, n / 8) from[k] = take8(x, 8 * i);
            FOR_BOTH(k, i, first, n / 8) {
                widen8(from[k], v);
                function_of_one<8>(f, v, by);
                store8(y, 8 * i, v);
            }
        }
        return;
    }
    FOR_MINE(i, n) {
        v[0] = x[i];
        function_of_one<1>(f, v, by);
        y.set(i, v[0]);
    }
}

// y = f(a, b), where b repeats over leading dims: n = elements, function, elements of b.
KERNEL(binary) {
    In<T0> x(a.x[0]);
    In<T1> b(a.x[1]);
    Out<O0> y(a.y[0]);
    const int f = (int)a.n[1];
    const bool repeats = a.n[2] != a.n[0];
    float v[8], w[8];
    if (WIDE) {
        FOR_PAIRS(first, a.n[0] / 8) {
            Eight<T0> left[AT_ONCE];
            Eight<T1> right[AT_ONCE];
            FOR_BOTH(k, i, first, a.n[0] / 8) {
                i64 at = 8 * i;
                if (repeats) divide(8 * i, a.n[2], at);
                left[k] = take8(x, 8 * i);
                right[k] = take8(b, at);
            }
            FOR_BOTH(k, i, first, a.n[0] / 8) {
                widen8(left[k], v);
                widen8(right[k], w);
                function_of_two<8>(f, v, w);
                store8(y, 8 * i, v);
            }
        }
        return;
    }
    FOR_EACH(i, a.n[0]) {
        i64 at = i;
        if (repeats) divide(i, a.n[2], at);
        v[0] = x[i];
        w[0] = b[at];
        function_of_two<1>(f, v, w);
        y.set(i, v[0]);
    }
}

// y = x * scale of the row: n = elements, width.
KERNEL(scale_rows) {
    In<T0> x(a.x[0]);
    In<T1> scale(a.x[1]);
    Out<O0> y(a.y[0]);
    i64 c;
    if (WIDE) {
        FOR_EACH(i, a.n[0] / 8) {
            float v[8];
            const float by = scale[divide(8 * i, a.n[1], c)];
            load8(x, 8 * i, v);
            for (int k = 0; k < 8; k++) v[k] *= by;
            store8(y, 8 * i, v);
        }
        return;
    }
    FOR_EACH(i, a.n[0]) y.set(i, x[i] * scale[divide(i, a.n[1], c)]);
}

// y += x: n = elements.
JOINED_KERNEL(accumulate) {
    In<T0> x(a.x[0]);
    Out<O0> y(a.y[0]);
    const i64 n = a.n[0];
    if (WIDE) {
        In<O0> before(a.y[0]);
        FOR_MY_PAIRS(first, n / 8) {
            Eight<O0> old[AT_ONCE];
            Eight<T0> more[AT_ONCE];
            float v[8], w[8];
            FOR_BOTH(k, i, first, n / 8) {
                old[k] = take8(before, 8 * i);
                more[k] = take8(x, 8 * i);
            }
            FOR_BOTH(k, i, first, n / 8) {
                widen8(old[k], v);
                widen8(more[k], w);
                for (int j = 0; j < 8; j++) v[j] += w[j];
                store8(y, 8 * i, v);
            }
        }
        return;
    }
    FOR_MINE(i, n) y.set(i, y[i] + x[i]);
}

// y = a number: n = elements; f = the number.
JOINED_KERNEL(fill) {
    Out<O0> y(a.y[0]);
    const float v = (float)a.f[0];
    const i64 n = a.n[0];
    if (WIDE) {
        const float all[8] = {v, v, v, v, v, v, v, v};
        FOR_MINE(i, n / 8) store8(y, 8 * i, all);
        return;
    }
    FOR_MINE(i, n) y.set(i, v);
}

// The name of element `i` in the whole tensor, by which random numbers are drawn.
DEVICE u64 name_of(const Args &a, i64 i) {
    u64 name = 0;
    for (int d = (int)a.n[1] - 1; d >= 0; d--) {
        const i64 *dim = a.n + 8 + 3 * d;
        i64 index;
        i = divide(i, dim[0], index);
        index += dim[1];
        if (d == 1) index = position(index, a.n[6], a.n[7]);
        name += (u64)(index * dim[2]);
    }
    return name;
}

// Zero with a probability, else scaled: n = elements, rank, then four words of the key, chunk and
// ranks of the order of dim 1, and for each dim extent, first index and stride in the whole
// tensor; f = probability, scale. By eights their names follow each other from a multiple of 4.
KERNEL(dropout) {
    In<T0> x(a.x[0]);
    Out<O0> y(a.y[0]);
    const float scale = (float)a.f[1];
    if (WIDE) {
        FOR_EACH(i, a.n[0] / 8) {
            const u64 name = name_of(a, 8 * i);
            float v[8], u[8];
            load8(x, 8 * i, v);
            uniform4(name, a.n + 2, u);
            uniform4(name + 4, a.n + 2, u + 4);
            for (int k = 0; k < 8; k++) v[k] = (double)u[k] < a.f[0] ? 0.0f : v[k] * scale;
            store8(y, 8 * i, v);
        }
        return;
    }
    FOR_EACH(i, a.n[0]) {
        bool dropped = (double)uniform(name_of(a, i), a.n + 2) < a.f[0];
        y.set(i, dropped ? 0.0f : x[i] * scale);
    }
}
