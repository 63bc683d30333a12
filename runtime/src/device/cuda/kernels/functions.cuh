// Functions of elements.

// x * P(X <= x) for a standard normal X, by erfc, which keeps the lower tail.
DEVICE float normal_cdf(float x) { return 0.5f * erfcf(-x * 0.70710678f); }
DEVICE float logistic(float x) { return reciprocal(1.0f + expf(-x)); }
// u and du/dx with GELU(x) ~ x * logistic(u).
DEVICE float gelu_argument(float x) { return 1.59576912f * x * (1.0f + 0.044715f * x * x); }
DEVICE float gelu_slope(float x) { return 1.59576912f * (1.0f + 0.134145f * x * x); }

// Of so many elements at once: which function it is, is asked once for all of them.
#define ALL(value)                                                                               \
    for (int k = 0; k < N; k++) {                                                                \
        const float x = v[k];                                                                    \
        v[k] = value;                                                                            \
    }                                                                                            \
    break

template <int N> DEVICE void function_of_one(int f, float *v, float by) {
    switch (f) {
    case 0: ALL(-x);
    case 1: ALL(by * x);
    case 2: ALL(x * normal_cdf(x));
    case 3: ALL(x * logistic(gelu_argument(x)));
    case 4: ALL(x * logistic(x));
    case 5: ALL(x < 0.0f ? 0.0f : x);
    case 6: ALL(expf(x));
    case 7: ALL(tanhf(x));
    case 8: ALL(x * x);
    case 9: ALL(logistic(x));
    default: break;
    }
}

// Slopes times a gradient.
DEVICE float gelu_tanh_grad(float x, float g) {
    const float s = logistic(gelu_argument(x));
    return g * (s + x * gelu_slope(x) * s * (1.0f - s));
}
DEVICE float silu_grad(float x, float g) {
    const float s = logistic(x);
    return g * (s + x * s * (1.0f - s));
}
DEVICE float gelu_erf_grad(float x, float g) {
    return g * (normal_cdf(x) + x * 0.39894228f * expf(-0.5f * x * x));
}

template <int N> DEVICE void function_of_two(int f, float *v, const float *w) {
    switch (f) {
    case 0: ALL(plus(x, w[k]));
    case 1: ALL(plus(x, -w[k]));
    case 2: ALL(x * w[k]);
    case 3: ALL(gelu_erf_grad(x, w[k]));
    case 4: ALL(gelu_tanh_grad(x, w[k]));
    case 5: ALL(silu_grad(x, w[k]));
    default: ALL(x <= 0.0f ? 0.0f : w[k]);
    }
}
