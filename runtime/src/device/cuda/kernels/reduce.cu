// Sums and maxima over dims, and the sum of squares. Terms are added in f64.

DEVICE i64 offset(i64 i, const i64 *dims, int rank) {
    i64 at = 0, index;
    for (int d = rank - 1; d > 0; d--) {
        i = divide(i, dims[2 * d], index);
        at += index * dims[2 * d + 1];
    }
    // The outermost index is what is left.
    return rank > 0 ? at + i * dims[1] : at;
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

// The logarithm of the sum of exponentials over members, in their order: n = elements of y, members.
KERNEL(members_log_sum_exp) {
    In<T0> x(a.x[0]);
    Out<O0> y(a.y[0]);
    FOR_EACH(i, a.n[0]) {
        float total = x[i];
        for (i64 j = 1; j < a.n[1]; j++) {
            const float v = x[j * a.n[0] + i];
            const float high = total >= v ? total : v, low = total >= v ? v : total;
            total = low == -INFINITE ? high : high + log1pf(expf(low - high));
        }
        y.set(i, total);
    }
}

// A block's part of a sum of squares goes to its place in the scratch memory y: n = elements.
JOINED_KERNEL(squares) {
    In<T0> x(a.x[0]);
    Out<double> y(a.y[0]);
    const i64 n = a.n[0];
    double sum = 0;
    if (WIDE) {
        FOR_MINE(i, n / 8) {
            float v[8];
            load8(x, 8 * i, v);
            for (int k = 0; k < 8; k++) sum += (double)v[k] * v[k];
        }
    } else {
        FOR_MINE(i, n) {
            double v = x[i];
            sum += v * v;
        }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) y.raw(grid.block, sum);
}

// And the parts to their sum, by one block: n = parts.
JOINED_KERNEL(sum_parts) {
    In<double> x(a.x[0]);
    Out<O0> y(a.y[0]);
    const i64 n = a.n[0];
    double sum = 0;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) sum += x.raw(i);
    sum = block_sum(sum);
    if (threadIdx.x == 0) y.set(0, (float)sum);
}

// In what a thread adds up its few terms: halves lose nothing in f32 that their rounding would show.
template <class T> struct Sum {
    typedef float type;
};
template <> struct Sum<f32> {
    typedef double type;
};

// Sums over rows for 32 columns, or 32 eights of them, and a part of the rows a block, of one of some
// matrices, to scratch memory y of parts x matrices x width: n = rows, width, rows of a part.
KERNEL(column_sums) {
    In<T0> x(a.x[0]);
    Out<double> y(a.y[0]);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 width = a.n[1], first = (i64)blockIdx.y * a.n[2];
    const i64 last = first + a.n[2] < a.n[0] ? first + a.n[2] : a.n[0];
    const i64 from = blockIdx.z * a.n[0] * width;
    const i64 to = ((i64)blockIdx.y * gridDim.z + blockIdx.z) * width;
    if (WIDE) {
        typedef typename Sum<T0>::type Term;
        __shared__ Term eights[8][8][32];
        Term sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        const i64 c = ((i64)blockIdx.x * 32 + lane) * 8;
        if (c < width) {
#pragma unroll 4
            for (i64 row = first + warp; row < last; row += 8) {
                float v[8];
                load8(x, from + row * width + c, v);
                for (int k = 0; k < 8; k++) sum[k] += v[k];
            }
        }
        add_warps(eights, sum, y, to, width);
        return;
    }
    __shared__ double sums[8][32];
    const i64 c = (i64)blockIdx.x * 32 + lane;
    double sum = 0;
    if (c < width)
        for (i64 row = first + warp; row < last; row += 8) sum += x[from + row * width + c];
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || c >= width) return;
    for (int i = 1; i < 8; i++) sum += sums[i][lane];
    y.raw(to + c, sum);
}

// The parts of each column to their sum, a block for 32 columns, whose warps have every so many-th
// part: n = width, parts.
KERNEL(add_parts) {
    In<double> x(a.x[0]);
    Out<O0> y(a.y[0]);
    __shared__ double sums[32][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const i64 c = (i64)blockIdx.x * 32 + lane;
    double sum = 0;
    if (c < a.n[0]) {
#pragma unroll 4
        for (i64 part = warp; part < a.n[1]; part += warps) sum += x.raw(part * a.n[0] + c);
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || c >= a.n[0]) return;
    for (int i = 1; i < warps; i++) sum += sums[i][lane];
    y.set(c, (float)sum);
}
