// Layer and root-mean-square norms over the last dim, and their gradients.
//
// n = rows, width, threads of a row. Where a row is taken by eights (`WIDE`), it stays in registers:
// each element is read once. A row of up to 1024 elements is a warp's, and so needs no barrier;
// a wider one is a block's. All others are read once for each pass by a block.

// Eights of a thread.
#define MOST_EIGHTS 4

// What a thread has of a row, as it is stored.
template <class T> struct Piece {
    Eight<T> part[MOST_EIGHTS];
};

// The threads of a row, and the rows of a block.
struct Rows {
    i64 first, step;
    int thread, threads;
    __device__ __forceinline__ Rows(const Args &a) {
        threads = (int)a.n[2];
        thread = (int)threadIdx.x % threads;
        const int at_once = (int)blockDim.x / threads;
        first = (i64)blockIdx.x * at_once + (int)threadIdx.x / threads;
        step = (i64)gridDim.x * at_once;
    }
    // The sum over the threads of a row.
    __device__ __forceinline__ float sum(float v) const { return threads == 32 ? warp_sum(v) : block_sum(v); }
};

// For each eight of the row that is this thread's: `k` of its piece, column `c`.
#define FOR_EIGHTS(k, c, rows, width)                                                            \
    _Pragma("unroll") for (int k = 0, c = 8 * rows.thread; k < MOST_EIGHTS;                      \
                           k++, c += 8 * rows.threads) if (c < width)

template <class T> DEVICE void take_row(Piece<T> &piece, const In<T> &x, i64 row, const Rows &rows,
                                        int width) {
    FOR_EIGHTS(k, c, rows, width) piece.part[k] = take8(x, row * width + c);
}

// A row of sums, which is written if anybody else wants it.
template <class L, class R, class S> struct Sums {
    In<L> l;
    In<R> r;
    Out<S> sum;
    bool is_written;
    __device__ __forceinline__ Sums(const Args &a)
        : l(a.x[0]), r(a.x[1]), sum(a.n[3] != 0 ? a.y[0] : Span{a.x[0].at, 0}),
          is_written(a.n[3] != 0) {}
};
template <class L, class R, class S>
DEVICE void take_row(Piece<S> &piece, const Sums<L, R, S> &from, i64 row, const Rows &rows,
                     int width) {
    Piece<L> left;
    Piece<R> right;
    take_row(left, from.l, row, rows, width);
    take_row(right, from.r, row, rows, width);
    float v[8], w[8];
    FOR_EIGHTS(k, c, rows, width) {
        widen8(left.part[k], v);
        widen8(right.part[k], w);
        for (int i = 0; i < 8; i++) v[i] = plus(v[i], w[i]);
        piece.part[k] = stored8<S>(v);
        if (from.is_written) put8(from.sum, row * width + c, piece.part[k]);
    }
}

// The norm of rows by eights; the mean is 0 where there is none.
template <class X, class From, class Gamma, class Beta, class Y, class Mean, class Rstd>
DEVICE void norm_rows(const Args &a, const From &x, const In<Gamma> &gamma, Beta beta,
                      const Out<Y> &y, Mean set_mean, const Rstd &rstds, bool is_centred) {
    const Rows rows(a);
    const int width = (int)a.n[1];
    for (i64 row = rows.first; row < a.n[0]; row += rows.step) {
        Piece<X> piece;
        take_row(piece, x, row, rows, width);
        float sum = 0, squares = 0, v[8], g[8], b[8];
        if (is_centred) {
            FOR_EIGHTS(k, c, rows, width) {
                widen8(piece.part[k], v);
                for (int i = 0; i < 8; i++) sum += v[i];
            }
            sum = rows.sum(sum);
        }
        const float mean = is_centred ? sum / width : 0.0f;
        FOR_EIGHTS(k, c, rows, width) {
            widen8(piece.part[k], v);
            for (int i = 0; i < 8; i++) squares += (v[i] - mean) * (v[i] - mean);
        }
        const float rstd = 1.0f / sqrtf(rows.sum(squares) / width + (float)a.f[0]);
        FOR_EIGHTS(k, c, rows, width) {
            widen8(piece.part[k], v);
            load8(gamma, c, g);
            beta(c, b);
            for (int i = 0; i < 8; i++) v[i] = (v[i] - mean) * rstd * g[i] + b[i];
            store8(y, row * width + c, v);
        }
        if (rows.thread == 0) {
            set_mean(row, mean);
            rstds.set(row, rstd);
        }
    }
}

// y, mean, rstd; f = eps.
KERNEL(layer_norm) {
    In<T0> x(a.x[0]);
    In<T1> gamma(a.x[1]);
    In<T2> beta(a.x[2]);
    Out<O0> y(a.y[0]);
    Out<O1> means(a.y[1]);
    Out<O2> rstds(a.y[2]);
    const i64 width = a.n[1];
    if (WIDE) {
        const auto bias = [&](i64 c, float *b) { load8(beta, c, b); };
        const auto set_mean = [&](i64 row, float mean) { means.set(row, mean); };
        norm_rows<T0>(a, x, gamma, bias, y, set_mean, rstds, true);
        return;
    }
    for (i64 row = blockIdx.x; row < a.n[0]; row += gridDim.x) {
        float sum = 0, squares = 0;
        for (i64 c = threadIdx.x; c < width; c += blockDim.x) sum += x[row * width + c];
        const float mean = block_sum(sum) / width;
        for (i64 c = threadIdx.x; c < width; c += blockDim.x) {
            float from_mean = x[row * width + c] - mean;
            squares += from_mean * from_mean;
        }
        const float rstd = 1.0f / sqrtf(block_sum(squares) / width + (float)a.f[0]);
        for (i64 c = threadIdx.x; c < width; c += blockDim.x)
            y.set(row * width + c, (x[row * width + c] - mean) * rstd * gamma[c] + beta[c]);
        if (threadIdx.x == 0) {
            means.set(row, mean);
            rstds.set(row, rstd);
        }
    }
}

// y, rstd; f = eps.
KERNEL(rms_norm) {
    In<T0> x(a.x[0]);
    In<T1> gamma(a.x[1]);
    Out<O0> y(a.y[0]);
    Out<O1> rstds(a.y[1]);
    const i64 width = a.n[1];
    if (WIDE) {
        const auto bias = [](i64, float *b) {
            for (int i = 0; i < 8; i++) b[i] = 0;
        };
        norm_rows<T0>(a, x, gamma, bias, y, [](i64, float) {}, rstds, false);
        return;
    }
    for (i64 row = blockIdx.x; row < a.n[0]; row += gridDim.x) {
        float squares = 0;
        for (i64 c = threadIdx.x; c < width; c += blockDim.x) {
            float v = x[row * width + c];
            squares += v * v;
        }
        const float rstd = 1.0f / sqrtf(block_sum(squares) / width + (float)a.f[0]);
        for (i64 c = threadIdx.x; c < width; c += blockDim.x)
            y.set(row * width + c, x[row * width + c] * rstd * gamma[c]);
        if (threadIdx.x == 0) rstds.set(row, rstd);
    }
}

// Both with the sum that they are a norm of, by eights alone: two operands in place of x, and the sum
// before y; n[3] = whether it is written.
KERNEL(sum_layer_norm) {
    In<T2> gamma(a.x[2]);
    In<T3> beta(a.x[3]);
    Out<O1> y(a.y[1]);
    Out<O2> means(a.y[2]);
    Out<O3> rstds(a.y[3]);
    const auto bias = [&](i64 c, float *b) { load8(beta, c, b); };
    const auto set_mean = [&](i64 row, float mean) { means.set(row, mean); };
    norm_rows<O0>(a, Sums<T0, T1, O0>(a), gamma, bias, y, set_mean, rstds, true);
}
KERNEL(sum_rms_norm) {
    In<T2> gamma(a.x[2]);
    Out<O1> y(a.y[1]);
    Out<O2> rstds(a.y[2]);
    const auto bias = [](i64, float *b) {
        for (int i = 0; i < 8; i++) b[i] = 0;
    };
    norm_rows<O0>(a, Sums<T0, T1, O0>(a), gamma, bias, y, [](i64, float) {}, rstds, false);
}

// dx = rstd * (g - avg(g) - xhat * avg(g * xhat)), g = dy * gamma; without avg(g) where there is
// no mean.
template <class Dy, class X, class Gamma, class Dx>
DEVICE void grad_input(const Dy &dy, const X &x, const Gamma &gamma, float mean, float rstd,
                       bool is_centred, i64 row, i64 width, const Dx &dx) {
    float sum_g = 0, sum_gx = 0;
    for (i64 c = threadIdx.x; c < width; c += blockDim.x) {
        float g = dy[row * width + c] * gamma[c];
        sum_g += g;
        sum_gx += g * (x[row * width + c] - mean) * rstd;
    }
    const float avg_g = is_centred ? block_sum(sum_g) / width : 0.0f;
    const float avg_gx = block_sum(sum_gx) / width;
    for (i64 c = threadIdx.x; c < width; c += blockDim.x) {
        float g = dy[row * width + c] * gamma[c], xhat = (x[row * width + c] - mean) * rstd;
        dx.set(row * width + c, rstd * (g - avg_g - xhat * avg_gx));
    }
}

// The same by eights; `more` adds to eight of them.
template <class Dy, class X, class Gamma, class More, class Dx>
DEVICE void grad_input_by_eights(const In<Dy> &dy, const In<X> &x, const In<Gamma> &gamma,
                                 float mean, float rstd, bool is_centred, i64 row,
                                 const Rows &rows, int width, More more, const Out<Dx> &dx) {
    Piece<Dy> dys;
    Piece<X> xs;
    take_row(dys, dy, row, rows, width);
    take_row(xs, x, row, rows, width);
    float sum_g = 0, sum_gx = 0, d[8], v[8], g[8];
    FOR_EIGHTS(k, c, rows, width) {
        widen8(dys.part[k], d);
        widen8(xs.part[k], v);
        load8(gamma, c, g);
        for (int i = 0; i < 8; i++) {
            sum_g += d[i] * g[i];
            sum_gx += d[i] * g[i] * (v[i] - mean) * rstd;
        }
    }
    const float avg_g = is_centred ? rows.sum(sum_g) / width : 0.0f;
    const float avg_gx = rows.sum(sum_gx) / width;
    FOR_EIGHTS(k, c, rows, width) {
        widen8(dys.part[k], d);
        widen8(xs.part[k], v);
        load8(gamma, c, g);
        for (int i = 0; i < 8; i++)
            d[i] = rstd * (d[i] * g[i] - avg_g - (v[i] - mean) * rstd * avg_gx);
        more(row * width + c, d);
        store8(dx, row * width + c, d);
    }
}

// Rows one after the other, either way.
template <class Dy, class X, class Gamma, class Mean, class Rstd, class Dx>
DEVICE void grad_inputs(const Args &a, const In<Dy> &dy, const In<X> &x, const In<Gamma> &gamma,
                        Mean mean, const Rstd &rstd, bool is_centred, const Out<Dx> &dx) {
    if (WIDE) {
        const Rows rows(a);
        for (i64 row = rows.first; row < a.n[0]; row += rows.step)
            grad_input_by_eights(dy, x, gamma, mean(row), rstd[row], is_centred, row, rows,
                                 (int)a.n[1], [](i64, float *) {}, dx);
        return;
    }
    for (i64 row = blockIdx.x; row < a.n[0]; row += gridDim.x)
        grad_input(dy, x, gamma, mean(row), rstd[row], is_centred, row, a.n[1], dx);
}

// dy, x, gamma, mean, rstd to dx.
KERNEL(layer_norm_grad_input) {
    In<T0> dy(a.x[0]);
    In<T1> x(a.x[1]);
    In<T2> gamma(a.x[2]);
    In<T3> means(a.x[3]);
    In<T4> rstd(a.x[4]);
    Out<O0> dx(a.y[0]);
    grad_inputs(a, dy, x, gamma, [&](i64 row) { return means[row]; }, rstd, true, dx);
}

// dy, x, gamma, rstd to dx.
KERNEL(rms_norm_grad_input) {
    In<T0> dy(a.x[0]);
    In<T1> x(a.x[1]);
    In<T2> gamma(a.x[2]);
    In<T3> rstd(a.x[3]);
    Out<O0> dx(a.y[0]);
    grad_inputs(a, dy, x, gamma, [](i64) { return 0.0f; }, rstd, false, dx);
}

// With another gradient that is added, by eights alone.
template <class Dy, class X, class Gamma, class Mean, class Rstd, class Other, class Dx>
DEVICE void grad_inputs_sum(const Args &a, const In<Dy> &dy, const In<X> &x, const In<Gamma> &gamma,
                            Mean mean, const Rstd &rstd, bool is_centred, const In<Other> &other,
                            const Out<Dx> &dx) {
    const Rows rows(a);
    const auto more = [&](i64 at, float *d) {
        float o[8];
        load8(other, at, o);
        for (int i = 0; i < 8; i++) d[i] = plus(d[i], o[i]);
    };
    for (i64 row = rows.first; row < a.n[0]; row += rows.step)
        grad_input_by_eights(dy, x, gamma, mean(row), rstd[row], is_centred, row, rows,
                             (int)a.n[1], more, dx);
}

// dy, x, gamma, mean, rstd and another gradient to its sum with dx.
KERNEL(layer_norm_grad_input_sum) {
    In<T0> dy(a.x[0]);
    In<T1> x(a.x[1]);
    In<T2> gamma(a.x[2]);
    In<T3> means(a.x[3]);
    In<T4> rstd(a.x[4]);
    In<T5> other(a.x[5]);
    Out<O0> dx(a.y[0]);
    grad_inputs_sum(a, dy, x, gamma, [&](i64 row) { return means[row]; }, rstd, true, other, dx);
}

// dy, x, gamma, rstd and another gradient to its sum with dx.
KERNEL(rms_norm_grad_input_sum) {
    In<T0> dy(a.x[0]);
    In<T1> x(a.x[1]);
    In<T2> gamma(a.x[2]);
    In<T3> rstd(a.x[3]);
    In<T4> other(a.x[4]);
    Out<O0> dx(a.y[0]);
    grad_inputs_sum(a, dy, x, gamma, [](i64) { return 0.0f; }, rstd, false, other, dx);
}

// Sums over a part of the rows of dy * xhat and dy, for 32 columns a block of 32 x 8 threads, or 32
// eights of them; the order of the terms is that of the rows, eight apart. They go to scratch memory
// of parts x width.
template <class Dy, class X, class Mean, class Rstd>
DEVICE void grad_weight(const Args &a, const In<Dy> &dy, const In<X> &x, Mean mean,
                        const Rstd &rstd, bool has_bias) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 width = a.n[1], first = (i64)blockIdx.y * a.n[2];
    const i64 last = first + a.n[2] < a.n[0] ? first + a.n[2] : a.n[0];
    Out<double> to_gamma(a.y[0]);
    if (WIDE) {
        __shared__ float sums[8][8][32];
        const i64 c = ((i64)blockIdx.x * 32 + lane) * 8;
        float g[8] = {0, 0, 0, 0, 0, 0, 0, 0}, b[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (c < width) {
#pragma unroll 4
            for (i64 row = first + warp; row < last; row += 8) {
                float d[8], v[8];
                load8(dy, row * width + c, d);
                load8(x, row * width + c, v);
                const float m = mean(row), r = rstd[row];
                for (int i = 0; i < 8; i++) {
                    g[i] += d[i] * (v[i] - m) * r;
                    b[i] += d[i];
                }
            }
        }
        add_warps(sums, g, to_gamma, blockIdx.y * width, width);
        if (!has_bias) return;
        Out<double> to_beta(a.y[1]);
        add_warps(sums, b, to_beta, blockIdx.y * width, width);
        return;
    }
    __shared__ float gammas[8][32], betas[8][32];
    const i64 c = (i64)blockIdx.x * 32 + lane;
    float g = 0, b = 0;
    if (c < width)
        for (i64 row = first + warp; row < last; row += 8) {
            float v = dy[row * width + c];
            g += v * (x[row * width + c] - mean(row)) * rstd[row];
            b += v;
        }
    gammas[warp][lane] = g;
    betas[warp][lane] = b;
    __syncthreads();
    if (warp != 0 || c >= width) return;
    double dgamma = 0, dbeta = 0;
    for (int i = 0; i < 8; i++) {
        dgamma += gammas[i][lane];
        dbeta += betas[i][lane];
    }
    to_gamma.raw((i64)blockIdx.y * width + c, dgamma);
    if (!has_bias) return;
    Out<double> to_beta(a.y[1]);
    to_beta.raw((i64)blockIdx.y * width + c, dbeta);
}

// dy, x, mean, rstd to parts of dgamma, dbeta: n = rows, width, rows of a part.
KERNEL(layer_norm_grad_weight) {
    In<T0> dy(a.x[0]);
    In<T1> x(a.x[1]);
    In<T2> means(a.x[2]);
    In<T3> rstd(a.x[3]);
    grad_weight(a, dy, x, [&](i64 row) { return means[row]; }, rstd, true);
}

// dy, x, rstd to parts of dgamma: n = rows, width, rows of a part.
KERNEL(rms_norm_grad_weight) {
    In<T0> dy(a.x[0]);
    In<T1> x(a.x[1]);
    In<T2> rstd(a.x[2]);
    grad_weight(a, dy, x, [](i64) { return 0.0f; }, rstd, false);
}
