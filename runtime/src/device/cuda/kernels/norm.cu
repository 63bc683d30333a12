// Layer and root-mean-square norms over the last dim, and their gradients.

// A block per row: y, mean, rstd; n = rows, width; f = eps.
KERNEL(layer_norm) {
    In<T0> x(a.x[0]);
    In<T1> gamma(a.x[1]);
    In<T2> beta(a.x[2]);
    Out<O0> y(a.y[0]);
    Out<O1> means(a.y[1]);
    Out<O2> rstds(a.y[2]);
    const i64 width = a.n[1];
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

// A block per row: y, rstd; n = rows, width; f = eps.
KERNEL(rms_norm) {
    In<T0> x(a.x[0]);
    In<T1> gamma(a.x[1]);
    Out<O0> y(a.y[0]);
    Out<O1> rstds(a.y[1]);
    const i64 width = a.n[1];
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

// dx = rstd * (g - avg(g) - xhat * avg(g * xhat)), g = dy * gamma; without avg(g) where there is
// no mean.
template <class Dy, class X, class Gamma, class Dx>
DEVICE void grad_input(Dy dy, X x, Gamma gamma, float mean, float rstd, bool is_centred, i64 row,
                       i64 width, Dx dx) {
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

// dy, x, gamma, mean, rstd to dx: n = rows, width.
KERNEL(layer_norm_grad_input) {
    In<T0> dy(a.x[0]);
    In<T1> x(a.x[1]);
    In<T2> gamma(a.x[2]);
    In<T3> mean(a.x[3]);
    In<T4> rstd(a.x[4]);
    Out<O0> dx(a.y[0]);
    for (i64 row = blockIdx.x; row < a.n[0]; row += gridDim.x)
        grad_input(dy, x, gamma, mean[row], rstd[row], true, row, a.n[1], dx);
}

// dy, x, gamma, rstd to dx: n = rows, width.
KERNEL(rms_norm_grad_input) {
    In<T0> dy(a.x[0]);
    In<T1> x(a.x[1]);
    In<T2> gamma(a.x[2]);
    In<T3> rstd(a.x[3]);
    Out<O0> dx(a.y[0]);
    for (i64 row = blockIdx.x; row < a.n[0]; row += gridDim.x)
        grad_input(dy, x, gamma, 0.0f, rstd[row], false, row, a.n[1], dx);
}

// Sums over a part of the rows of dy * xhat and dy, for 32 columns a block of 32 x 8 threads; the
// order of the terms is that of the rows, eight apart. They go to scratch memory of parts x width.
template <class Dy, class X, class Mean, class Rstd>
DEVICE void grad_weight(const Args &a, Dy dy, X x, Mean mean, Rstd rstd, bool has_bias) {
    __shared__ float gammas[8][32], betas[8][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 width = a.n[1], c = (i64)blockIdx.x * 32 + lane;
    const i64 first = (i64)blockIdx.y * a.n[2];
    const i64 last = first + a.n[2] < a.n[0] ? first + a.n[2] : a.n[0];
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
    Out<double> to_gamma(a.y[0]);
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
