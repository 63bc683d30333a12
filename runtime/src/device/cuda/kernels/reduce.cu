// Sums and maxima over dims, and the sum of squares. Terms are added in f64.

DEVICE i64 offset(i64 i, const i64 *dims, int rank) {
    i64 at = 0;
    for (int d = rank - 1; d >= 0; d--) {
        at += i % dims[2 * d] * dims[2 * d + 1];
        i /= dims[2 * d];
    }
    return at;
}

// A block per element of y: n = elements of y, kept dims, reduced dims, elements that each is
// made of, whether it is their maximum, then extent and stride of each dim, kept ones first.
KERNEL(reduce) {
    In<T0> x(a.x[0]);
    Out<O0> y(a.y[0]);
    const int kept = (int)a.n[1], reduced = (int)a.n[2];
    for (i64 i = blockIdx.x; i < a.n[0]; i += gridDim.x) {
        i64 first = offset(i, a.n + 5, kept);
        const i64 *dims = a.n + 5 + 2 * kept;
        if (a.n[4]) {
            float most = -INFINITE;
            for (i64 j = threadIdx.x; j < a.n[3]; j += blockDim.x)
                most = larger(most, x[first + offset(j, dims, reduced)]);
            most = block_max(most);
            if (threadIdx.x == 0) y.set(i, most);
        } else {
            double sum = 0;
            for (i64 j = threadIdx.x; j < a.n[3]; j += blockDim.x)
                sum += x[first + offset(j, dims, reduced)];
            sum = block_sum(sum);
            if (threadIdx.x == 0) y.set(i, (float)sum);
        }
    }
}

// The same with a thread per element of y, where each is made of few.
KERNEL(reduce_few) {
    In<T0> x(a.x[0]);
    Out<O0> y(a.y[0]);
    const int kept = (int)a.n[1], reduced = (int)a.n[2];
    FOR_EACH(i, a.n[0]) {
        i64 first = offset(i, a.n + 5, kept);
        const i64 *dims = a.n + 5 + 2 * kept;
        float most = -INFINITE;
        double sum = 0;
        for (i64 j = 0; j < a.n[3]; j++) {
            float v = x[first + offset(j, dims, reduced)];
            most = larger(most, v);
            sum += v;
        }
        y.set(i, a.n[4] ? most : (float)sum);
    }
}

// A block's part of a sum of squares goes to its place in the scratch memory y: n = elements.
KERNEL(squares) {
    In<T0> x(a.x[0]);
    Out<double> y(a.y[0]);
    double sum = 0;
    FOR_EACH(i, a.n[0]) {
        double v = x[i];
        sum += v * v;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) y.raw(blockIdx.x, sum);
}

// And the parts to their sum: n = parts.
KERNEL(sum_parts) {
    In<double> x(a.x[0]);
    Out<O0> y(a.y[0]);
    if (threadIdx.x != 0) return;
    double sum = 0;
    for (i64 i = 0; i < a.n[0]; i++) sum += x.raw(i);
    y.set(0, (float)sum);
}
