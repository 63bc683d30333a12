// Cross entropy over a vocabulary that may be sharded. n = rows, width, valid columns, first
// column.

// The largest number so far, and the sum of exponentials of the differences to it.
struct Exponentials {
    float most, sum;
    // e^(v - most), and 0 while there is nothing but -infinity.
    __device__ __forceinline__ float of(float v) const {
        return power_of_two((v - (most == -INFINITE ? 0.0f : most)) * LOG2_E);
    }
    // Goes over to a larger one.
    __device__ __forceinline__ void raise(float to) {
        if (to == most) return;
        const float before = most;
        most = to;
        sum *= of(before);
    }
};

// A block per row, which is read once: where a thread meets a larger number, its sum is scaled.
KERNEL(log_sum_exp) {
    In<T0> x(a.x[0]);
    Out<O0> y(a.y[0]);
    const i64 width = a.n[1], valid = a.n[2];
    for (i64 row = blockIdx.x; row < a.n[0]; row += gridDim.x) {
        Exponentials own = {-INFINITE, 0.0f};
        if (WIDE)
            for (i64 c0 = 8 * threadIdx.x; c0 < valid; c0 += 16 * blockDim.x) {
                // Two eights are on their way at a time. Padding counts for nothing.
                float v[16];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const i64 c = c0 + half * 8 * (i64)blockDim.x;
                    if (c < valid) load8(x, row * width + c, v + 8 * half);
                    if (c + 8 > valid)
                        for (int k = 0; k < 8; k++)
                            v[8 * half + k] = c + k < valid ? v[8 * half + k] : -INFINITE;
                }
                float most = own.most;
#pragma unroll
                for (int k = 0; k < 16; k++) most = larger(v[k], most);
                own.raise(most);
#pragma unroll
                for (int k = 0; k < 16; k++) own.sum += own.of(v[k]);
            }
        else
            for (i64 c = threadIdx.x; c < valid; c += blockDim.x) {
                const float v = x[row * width + c];
                own.raise(larger(v, own.most));
                own.sum += own.of(v);
            }
        const float most = block_max(own.most);
        const bool is_number = most - most == 0.0f;
        if (is_number) own.raise(most);
        const float sum = block_sum(own.sum);
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

// By eights a block per row, else a thread per element.
KERNEL(cross_entropy_grad) {
    In<T0> x(a.x[0]);
    In<T1> lse(a.x[1]);
    In<i32> labels(a.x[2]);
    In<T3> dnll(a.x[3]);
    Out<O0> y(a.y[0]);
    if (WIDE) {
        const int width = (int)a.n[1];
        for (i64 row = blockIdx.x; row < a.n[0]; row += gridDim.x) {
            const i64 label = labels.raw(row), here = label - a.n[3];
            // The label's column, and how many columns have a gradient.
            const int at = label >= 0 && here >= 0 && here < a.n[2] ? (int)here : -1;
            const int valid = label >= 0 ? (int)a.n[2] : 0;
            const float norm = lse[row], by = dnll[row];
            for (int c0 = 8 * threadIdx.x; c0 < width; c0 += 16 * blockDim.x) {
                Eight<T0> from[2];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int c = c0 + half * 8 * (int)blockDim.x;
                    if (c < width) from[half] = take8(x, row * width + c);
                }
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int c = c0 + half * 8 * (int)blockDim.x;
                    if (c >= width) break;
                    float v[8];
                    widen8(from[half], v);
                    for (int k = 0; k < 8; k++) {
                        const float p = power_of_two((v[k] - norm) * LOG2_E);
                        v[k] = (c + k == at ? p - 1.0f : p) * by;
                    }
                    if (c + 8 > valid)
                        for (int k = 0; k < 8; k++) v[k] = c + k < valid ? v[k] : 0.0f;
                    store8(y, row * width + c, v);
                }
            }
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
