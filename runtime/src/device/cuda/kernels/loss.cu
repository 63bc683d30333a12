// Cross entropy over a vocabulary that may be sharded. n = rows, width, valid columns, first
// column.

// A block per row.
KERNEL(log_sum_exp) {
    In<T0> x(a.x[0]);
    Out<O0> y(a.y[0]);
    const i64 width = a.n[1], valid = a.n[2];
    for (i64 row = blockIdx.x; row < a.n[0]; row += gridDim.x) {
        float most = -INFINITE;
        if (WIDE)
            for (i64 c = 8 * threadIdx.x; c < valid; c += 8 * blockDim.x) {
                float v[8];
                load8(x, row * width + c, v);
                for (int k = 0; k < 8; k++)
                    if (c + k < valid) most = larger(v[k], most);
            }
        else
            for (i64 c = threadIdx.x; c < valid; c += blockDim.x)
                most = larger(x[row * width + c], most);
        most = block_max(most);
        const bool is_number = most - most == 0.0f;
        float sum = 0;
        if (WIDE)
            for (i64 c = 8 * threadIdx.x; is_number && c < valid; c += 8 * blockDim.x) {
                float v[8];
                load8(x, row * width + c, v);
                for (int k = 0; k < 8; k++)
                    if (c + k < valid) sum += expf(v[k] - most);
            }
        else
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
    if (WIDE) {
        FOR_EACH(i, a.n[0] * a.n[1] / 8) {
            float v[8];
            i64 c;
            const i64 row = divide(8 * i, a.n[1], c), label = labels.raw(row);
            const float norm = lse[row], by = dnll[row];
            load8(x, 8 * i, v);
            for (int k = 0; k < 8; k++) {
                const float p = expf(v[k] - norm);
                const bool is_label = label - a.n[3] == c + k, is_in = label >= 0 && c + k < a.n[2];
                v[k] = is_in ? (is_label ? p - 1.0f : p) * by : 0.0f;
            }
            store8(y, 8 * i, v);
        }
        return;
    }
    FOR_EACH(i, a.n[0] * a.n[1]) {
        i64 c;
        const i64 row = divide(i, a.n[1], c), label = labels.raw(row);
        if (label < 0 || c >= a.n[2]) {
            y.set(i, 0.0f);
            continue;
        }
        float p = expf(x[i] - lse[row]);
        y.set(i, (label - a.n[3] == c ? p - 1.0f : p) * dnll[row]);
    }
}
