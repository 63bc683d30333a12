// Cross entropy over a vocabulary that may be sharded. n = rows, width, valid columns, first
// column.

// A block per row.
KERNEL(log_sum_exp) {
    In<T0> x(a.x[0]);
    Out<O0> y(a.y[0]);
    const i64 width = a.n[1], valid = a.n[2];
    for (i64 row = blockIdx.x; row < a.n[0]; row += gridDim.x) {
        float most = -INFINITE;
        for (i64 c = threadIdx.x; c < valid; c += blockDim.x)
            most = larger(x[row * width + c], most);
        most = block_max(most);
        const bool is_number = most - most == 0.0f;
        float sum = 0;
        for (i64 c = threadIdx.x; is_number && c < valid; c += blockDim.x)
            sum += expf(x[row * width + c] - most);
        sum = block_sum(sum);
        // Infinities and NaN stay what they are.
        if (threadIdx.x == 0) y.set(row, is_number ? most + logf(sum) : most);
    }
}

KERNEL(cross_entropy) {
    In<T0> x(a.x[0]);
    In<T1> lse(a.x[1]);
    In<i32> labels(a.x[2]);
    Out<O0> y(a.y[0]);
    FOR_EACH(row, a.n[0]) {
        i64 label = labels.raw(row), c = label - a.n[3];
        bool is_here = label >= 0 && c >= 0 && c < a.n[2];
        y.set(row, is_here ? lse[row] - x[row * a.n[1] + c] : 0.0f);
    }
}

KERNEL(cross_entropy_grad) {
    In<T0> x(a.x[0]);
    In<T1> lse(a.x[1]);
    In<i32> labels(a.x[2]);
    In<T3> dnll(a.x[3]);
    Out<O0> y(a.y[0]);
    FOR_EACH(i, a.n[0] * a.n[1]) {
        i64 row = i / a.n[1], c = i % a.n[1], label = labels.raw(row);
        if (label < 0 || c >= a.n[2]) {
            y.set(i, 0.0f);
            continue;
        }
        float p = expf(x[i] - lse[row]);
        y.set(i, (label - a.n[3] == c ? p - 1.0f : p) * dnll[row]);
    }
}
