// Functions of elements.

// x * P(X <= x) for a standard normal X, by erfc, which keeps the lower tail.
DEVICE float normal_cdf(float x) { return 0.5f * erfcf(-x * 0.70710678f); }
DEVICE float logistic(float x) { return 1.0f / (1.0f + expf(-x)); }
// u and du/dx with GELU(x) ~ x * logistic(u).
DEVICE float gelu_argument(float x) { return 1.59576912f * x * (1.0f + 0.044715f * x * x); }
DEVICE float gelu_slope(float x) { return 1.59576912f * (1.0f + 0.134145f * x * x); }

DEVICE float function_of_one(i64 f, float x, float by) {
    switch (f) {
    case 0: return -x;
    case 1: return by * x;
    case 2: return x * normal_cdf(x);
    case 3: return x * logistic(gelu_argument(x));
    case 4: return x * logistic(x);
    case 5: return x < 0.0f ? 0.0f : x;
    case 6: return expf(x);
    case 7: return tanhf(x);
    case 8: return x * x;
    case 9: return logistic(x);
    default: return x;
    }
}

DEVICE float function_of_two(i64 f, float a, float b) {
    switch (f) {
    case 0: return a + b;
    case 1: return a - b;
    case 2: return a * b;
    case 3: return b * (normal_cdf(a) + a * 0.39894228f * expf(-0.5f * a * a));
    case 4: {
        float s = logistic(gelu_argument(a));
        return b * (s + a * gelu_slope(a) * s * (1.0f - s));
    }
    case 5: {
        float s = logistic(a);
        return b * (s + a * s * (1.0f - s));
    }
    default: return a <= 0.0f ? 0.0f : b;
    }
}

// y = f(x): n = elements, function; f = factor.
KERNEL(unary) {
    In<T0> x(a.x[0]);
    Out<O0> y(a.y[0]);
    if (WIDE) {
        FOR_EACH(i, a.n[0] / 8) {
            float v[8];
            load8(x, 8 * i, v);
            for (int k = 0; k < 8; k++) v[k] = function_of_one(a.n[1], v[k], (float)a.f[0]);
            store8(y, 8 * i, v);
        }
        return;
    }
    FOR_EACH(i, a.n[0]) y.set(i, function_of_one(a.n[1], x[i], (float)a.f[0]));
}

// y = f(a, b), where b repeats over leading dims: n = elements, function, elements of b.
KERNEL(binary) {
    In<T0> x(a.x[0]);
    In<T1> b(a.x[1]);
    Out<O0> y(a.y[0]);
    if (WIDE) {
        FOR_EACH(i, a.n[0] / 8) {
            float v[8], w[8];
            i64 at;
            divide(8 * i, a.n[2], at);
            load8(x, 8 * i, v);
            load8(b, at, w);
            for (int k = 0; k < 8; k++) v[k] = function_of_two(a.n[1], v[k], w[k]);
            store8(y, 8 * i, v);
        }
        return;
    }
    FOR_EACH(i, a.n[0]) y.set(i, function_of_two(a.n[1], x[i], b[i % a.n[2]]));
}

// y = x * scale of the row: n = elements, width.
KERNEL(scale_rows) {
    In<T0> x(a.x[0]);
    In<T1> scale(a.x[1]);
    Out<O0> y(a.y[0]);
    FOR_EACH(i, a.n[0]) y.set(i, x[i] * scale[i / a.n[1]]);
}

// y += x: n = elements.
KERNEL(accumulate) {
    In<T0> x(a.x[0]);
    Out<O0> y(a.y[0]);
    if (WIDE) {
        In<O0> before(a.y[0]);
        FOR_EACH(i, a.n[0] / 8) {
            float v[8], w[8];
            load8(before, 8 * i, v);
            load8(x, 8 * i, w);
            for (int k = 0; k < 8; k++) v[k] += w[k];
            store8(y, 8 * i, v);
        }
        return;
    }
    FOR_EACH(i, a.n[0]) y.set(i, y[i] + x[i]);
}

// y = a number: n = elements; f = the number.
KERNEL(fill) {
    Out<O0> y(a.y[0]);
    FOR_EACH(i, a.n[0]) y.set(i, (float)a.f[0]);
}

// Zero with a probability, else scaled: n = elements, rank, then four words of the key, chunk and
// ranks of the order of dim 1, and for each dim extent, first index and stride in the whole
// tensor; f = probability, scale.
KERNEL(dropout) {
    In<T0> x(a.x[0]);
    Out<O0> y(a.y[0]);
    FOR_EACH(i, a.n[0]) {
        i64 rest = i;
        u64 name = 0;
        for (int d = (int)a.n[1] - 1; d >= 0; d--) {
            const i64 *dim = a.n + 8 + 3 * d;
            i64 index = dim[1] + rest % dim[0];
            if (d == 1) index = position(index, a.n[6], a.n[7]);
            name += (u64)(index * dim[2]);
            rest /= dim[0];
        }
        bool dropped = (double)uniform(name, a.n + 2) < a.f[0];
        y.set(i, dropped ? 0.0f : x[i] * (float)a.f[1]);
    }
}
