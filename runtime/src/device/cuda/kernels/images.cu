// Images, channels last: windows as rows of matrices and back, so that convolutions are products;
// the largest of windows; norms of groups of channels.
//
// All operands that may be halves have type T0. The numbers of windows on an image are
// n = rows (windows or pixels of all samples), channels, height and width of the image, of a window,
// and numbers of windows along both, then stride, padding, and threads of a row.

struct Windows {
    i32 channels, height, width, kernel_y, kernel_x, rows, columns, stride, padding, of_row;
    __device__ __forceinline__ Windows(const Args &a)
        : channels((i32)a.n[1]), height((i32)a.n[2]), width((i32)a.n[3]), kernel_y((i32)a.n[4]),
          kernel_x((i32)a.n[5]), rows((i32)a.n[6]), columns((i32)a.n[7]), stride((i32)a.n[8]),
          padding((i32)a.n[9]), of_row((i32)a.n[10]) {}
};

// Sample, row and column of row `i` of matrices of `rows` x `columns`.
struct Spot {
    i64 sample;
    i32 row, column;
    __device__ __forceinline__ Spot(i64 i, i32 rows, i32 columns) {
        i64 rest;
        const i64 line = divide(i, columns, rest);
        column = (i32)rest;
        sample = divide(line, rows, rest);
        row = (i32)rest;
    }
};

// The windows that cover a pixel along one dim: from `first` up to before `end`.
struct Cover {
    i32 first, end;
    __device__ __forceinline__ Cover(i32 at, i32 kernel, i32 count, const Windows &w) {
        const i32 reach = at + w.padding, low = reach - kernel;
        first = low < 0 ? 0 : low / w.stride + 1;
        end = reach / w.stride + 1;
        end = end < count ? end : count;
    }
};

// In what terms are added up: halves lose nothing in f32 that their rounding would show.
template <class T> struct Sum {
    typedef float type;
};
template <> struct Sum<f32> {
    typedef double type;
};

// Rows of which some threads of a block have one each, a power of two.
#define FOR_ROWS(row, n, of_row)                                                                 \
    for (i64 row = (i64)blockIdx.x * (blockDim.x / (of_row)) + threadIdx.x / (of_row); row < (n); \
         row += (i64)gridDim.x * (blockDim.x / (of_row)))

template <int E, class T> DEVICE void take(const In<T> &x, i64 at, float *v) {
    if constexpr (E == 8) load8(x, at, v);
    else v[0] = x[at];
}
template <int E, class T> DEVICE void put(const Out<T> &y, i64 at, const float *v) {
    if constexpr (E == 8) store8(y, at, v);
    else y.set(at, v[0]);
}

template <int E> DEVICE void fill_rows(const Args &a) {
    In<T0> x(a.x[0]);
    Out<T0> y(a.y[0]);
    const Windows w(a);
    const u32 pieces = w.channels / E, n = w.kernel_y * w.kernel_x * pieces;
    FOR_ROWS(row, a.n[0], (u32)w.of_row) {
        const Spot spot(row, w.rows, w.columns);
        const i32 top = spot.row * w.stride - w.padding, left = spot.column * w.stride - w.padding;
        const i64 image = spot.sample * w.height * w.width;
        for (u32 j = threadIdx.x % w.of_row; j < n; j += w.of_row) {
            const u32 place = j / pieces, c = (j - place * pieces) * E;
            const i32 line = (i32)(place / w.kernel_x);
            const i32 up = top + line, across = left + (i32)place - line * w.kernel_x;
            const bool is_in = up >= 0 && up < w.height && across >= 0 && across < w.width;
            float v[E];
            for (int e = 0; e < E; e++) v[e] = 0;
            if (is_in) take<E>(x, (image + (i64)up * w.width + across) * w.channels + c, v);
            put<E>(y, (row * n + j) * E, v);
        }
    }
}

// An image to a row for each window: its pixels row by row, zeros beside the image.
KERNEL(windows) {
    if (WIDE) fill_rows<8>(a);
    else fill_rows<1>(a);
}

template <int E> DEVICE void add_rows(const Args &a) {
    typedef typename Sum<T0>::type Term;
    In<f32> x(a.x[0]);
    Out<T0> y(a.y[0]);
    const Windows w(a);
    const i64 length = (i64)w.kernel_y * w.kernel_x * w.channels;
    FOR_ROWS(pixel, a.n[0], (u32)w.of_row) {
        const Spot spot(pixel, w.height, w.width);
        const Cover down(spot.row, w.kernel_y, w.rows, w), across(spot.column, w.kernel_x, w.columns, w);
        const i64 image = spot.sample * w.rows * w.columns;
        for (i32 c = E * (threadIdx.x % w.of_row); c < w.channels; c += E * w.of_row) {
            Term sum[E];
            for (int e = 0; e < E; e++) sum[e] = 0;
            for (i32 row = down.first; row < down.end; row++)
                for (i32 column = across.first; column < across.end; column++) {
                    const i32 up = spot.row + w.padding - row * w.stride;
                    const i32 left = spot.column + w.padding - column * w.stride;
                    const i64 window = image + (i64)row * w.columns + column;
                    const i32 place = up * w.kernel_x + left;
                    float v[E];
                    take<E>(x, window * length + (i64)place * w.channels + c, v);
                    for (int e = 0; e < E; e++) sum[e] += v[e];
                }
            float v[E];
            for (int e = 0; e < E; e++) v[e] = (float)sum[e];
            put<E>(y, pixel * w.channels + c, v);
        }
    }
}

// Rows of windows in f32 to the image: each pixel is the sum of what the windows that cover it have
// there, in their order.
KERNEL(pixels) {
    if (WIDE) add_rows<8>(a);
    else add_rows<1>(a);
}

// The largest elements of windows, or their places in them; NaN is larger than all, and of equal ones
// the first is taken.
template <int E, bool IS_PLACE> DEVICE void largest(const Args &a) {
    In<T0> x(a.x[0]);
    const Windows w(a);
    FOR_ROWS(row, a.n[0], (u32)w.of_row) {
        const Spot spot(row, w.rows, w.columns);
        const i32 top = spot.row * w.stride - w.padding, left = spot.column * w.stride - w.padding;
        const i64 image = spot.sample * w.height * w.width;
        for (i32 c = E * (threadIdx.x % w.of_row); c < w.channels; c += E * w.of_row) {
            float best[E];
            i32 at[E];
            for (int e = 0; e < E; e++) {
                best[e] = -INFINITE;
                at[e] = -1;
            }
            for (i32 line = 0; line < w.kernel_y; line++)
                for (i32 along = 0; along < w.kernel_x; along++) {
                    const i32 up = top + line, across = left + along;
                    if (up < 0 || up >= w.height || across < 0 || across >= w.width) continue;
                    float v[E];
                    take<E>(x, (image + (i64)up * w.width + across) * w.channels + c, v);
                    for (int e = 0; e < E; e++)
                        if (v[e] > best[e] || v[e] != v[e] || at[e] < 0) {
                            best[e] = v[e];
                            at[e] = line * w.kernel_x + along;
                        }
                }
            if constexpr (IS_PLACE) {
                Out<i32> y(a.y[0]);
                for (int e = 0; e < E; e++) y.raw(row * w.channels + c + e, at[e]);
            } else {
                Out<T0> y(a.y[0]);
                put<E>(y, row * w.channels + c, best);
            }
        }
    }
}

KERNEL(max_pool) {
    if (WIDE) largest<8, false>(a);
    else largest<1, false>(a);
}
KERNEL(max_pool_places) {
    if (WIDE) largest<8, true>(a);
    else largest<1, true>(a);
}

template <int E> DEVICE void give_back(const Args &a) {
    typedef typename Sum<T0>::type Term;
    In<T0> dy(a.x[0]);
    In<i32> places(a.x[1]);
    Out<T0> dx(a.y[0]);
    const Windows w(a);
    FOR_ROWS(pixel, a.n[0], (u32)w.of_row) {
        const Spot spot(pixel, w.height, w.width);
        const Cover down(spot.row, w.kernel_y, w.rows, w), across(spot.column, w.kernel_x, w.columns, w);
        const i64 image = spot.sample * w.rows * w.columns;
        for (i32 c = E * (threadIdx.x % w.of_row); c < w.channels; c += E * w.of_row) {
            Term sum[E];
            for (int e = 0; e < E; e++) sum[e] = 0;
            for (i32 row = down.first; row < down.end; row++)
                for (i32 column = across.first; column < across.end; column++) {
                    const i32 up = spot.row + w.padding - row * w.stride;
                    const i32 left = spot.column + w.padding - column * w.stride;
                    const i64 at = (image + (i64)row * w.columns + column) * w.channels + c;
                    const i32 place = up * w.kernel_x + left;
                    float v[E];
                    take<E>(dy, at, v);
                    for (int e = 0; e < E; e++)
                        if (places.raw(at + e) == place) sum[e] += v[e];
                }
            float v[E];
            for (int e = 0; e < E; e++) v[e] = (float)sum[e];
            put<E>(dx, pixel * w.channels + c, v);
        }
    }
}

// Gradients of windows, and where their largest elements are, to the image's.
KERNEL(max_pool_grad) {
    if (WIDE) give_back<8>(a);
    else give_back<1>(a);
}

// Sums over pixels for each channel of a sample, by parts of the pixels, to scratch memory
// [sample][part][channel]: of x and x^2, or of dy and dy (x - mean). A thread has some columns and
// every so many-th pixel. n = pixels, channels, pixels of a part, columns of threads, channels of a
// group.
template <int E, bool IS_GRADIENT> DEVICE void add_pixels(const Args &a) {
    In<T0> x(a.x[0]);
    Out<double> first(a.y[0]);
    Out<double> second(a.y[1]);
    __shared__ double sums[256];
    const i64 pixels = a.n[0], channels = a.n[1];
    const i32 columns = (i32)a.n[3], t = (i32)threadIdx.x;
    const i64 c = E * ((i64)blockIdx.x * columns + t % columns), sample = blockIdx.z;
    const i64 begin = (i64)blockIdx.y * a.n[2];
    const i64 end = begin + a.n[2] < pixels ? begin + a.n[2] : pixels;
    const i32 apart = 256 / columns;
    double sum[E], more[E];
    float mean[E];
    for (int e = 0; e < E; e++) {
        sum[e] = more[e] = 0;
        mean[e] = 0;
    }
    if (c < channels) {
        if constexpr (IS_GRADIENT) {
            In<f32> means(a.x[2]);
            const i64 groups = channels / a.n[4];
            for (int e = 0; e < E; e++) mean[e] = means[sample * groups + (c + e) / a.n[4]];
        }
        for (i64 pixel = begin + t / columns; pixel < end; pixel += apart) {
            const i64 at = (sample * pixels + pixel) * channels + c;
            float v[E], u[E];
            take<E>(x, at, v);
            if constexpr (IS_GRADIENT) {
                In<T0> images(a.x[1]);
                take<E>(images, at, u);
            }
            for (int e = 0; e < E; e++) {
                sum[e] += v[e];
                more[e] += (double)v[e] * (IS_GRADIENT ? (double)u[e] - mean[e] : (double)v[e]);
            }
        }
    }
    const i64 to = (sample * gridDim.y + blockIdx.y) * channels + c;
    for (int e = 0; e < E; e++)
        for (int k = 0; k < 2; k++) {
            __syncthreads();
            sums[t] = k == 0 ? sum[e] : more[e];
            __syncthreads();
            if (t >= columns || c >= channels) continue;
            double all = 0;
            for (i32 i = t; i < 256; i += columns) all += sums[i];
            if (k == 0) first.raw(to + e, all);
            else second.raw(to + e, all);
        }
}

KERNEL(group_sums) {
    if (WIDE) add_pixels<8, false>(a);
    else add_pixels<1, false>(a);
}
KERNEL(group_sums_grad) {
    if (WIDE) add_pixels<8, true>(a);
    else add_pixels<1, true>(a);
}

DEVICE double all_lanes(double v) {
    for (int mask = 16; mask > 0; mask /= 2) v += __shfl_xor_sync(0xffffffffu, v, mask);
    return v;
}

// The sums of a group's channels over all parts, a warp for each group of a sample: to mean and
// 1 / deviation, or, weighted by gamma, to the averages of the gradient. n = groups of all samples,
// groups, channels of a group, parts, elements of a group, whether of the gradient; f = epsilon.
KERNEL(group_figures) {
    In<double> first(a.x[0]);
    In<double> second(a.x[1]);
    Out<f32> y(a.y[0]);
    Out<f32> z(a.y[1]);
    const i64 groups = a.n[1], width = a.n[2], terms = a.n[3] * width;
    const double n = (double)a.n[4];
    FOR_ROWS(i, a.n[0], 32) {
        i64 group, inside;
        const i64 sample = divide(i, groups, group);
        double sum = 0, more = 0;
        for (i64 j = threadIdx.x % 32; j < terms; j += 32) {
            const i64 part = divide(j, width, inside), c = group * width + inside;
            const i64 at = (sample * a.n[3] + part) * groups * width + c;
            double by = 1;
            if (a.n[5]) {
                In<T0> gamma(a.x[2]);
                by = gamma[c];
            }
            sum += by * first.raw(at);
            more += by * second.raw(at);
        }
        sum = all_lanes(sum) / n;
        more = all_lanes(more) / n;
        if (threadIdx.x % 32 != 0) continue;
        if (a.n[5]) {
            In<f32> rstd(a.x[3]);
            y.set(i, (float)sum);
            z.set(i, (float)(more * rstd[i]));
        } else {
            const double variance = more - sum * sum;
            y.set(i, (float)sum);
            z.set(i, (float)(1.0 / sqrt((variance > 0 || variance != variance ? variance : 0) + a.f[0])));
        }
    }
}

// Pixels of a thread that are on their way at a time.
#define PIXELS 2

// Columns of all pixels of a sample, by threads that keep what a column has: n = pixels, channels,
// samples, channels of a group. Forward x, gamma, beta, mean, rstd to y; the gradient dy, x, gamma,
// mean, rstd and the averages of g and g xhat to dx.
template <int E, bool IS_GRADIENT> DEVICE void scale_pixels(const Args &a) {
    In<T0> x(a.x[0]);
    In<T0> more(a.x[1]); // gamma, or x beside dy
    In<T0> last(a.x[2]); // beta, or gamma
    In<f32> means(a.x[3]);
    In<f32> rstds(a.x[4]);
    Out<T0> y(a.y[0]);
    const i64 pixels = a.n[0], channels = a.n[1], c = E * ((i64)blockIdx.x * blockDim.x + threadIdx.x);
    if (c >= channels) return;
    const i64 groups = channels / a.n[3];
    for (i64 sample = blockIdx.z; sample < a.n[2]; sample += gridDim.z) {
        float mean[E], rstd[E], gamma[E], beta[E], g[E], gx[E];
        for (int e = 0; e < E; e++) {
            const i64 i = sample * groups + (c + e) / a.n[3];
            mean[e] = means[i];
            rstd[e] = rstds[i];
            if constexpr (IS_GRADIENT) {
                In<f32> average(a.x[5]);
                In<f32> average_x(a.x[6]);
                g[e] = average[i];
                gx[e] = average_x[i];
            }
        }
        if constexpr (IS_GRADIENT) take<E>(last, c, gamma);
        else {
            take<E>(more, c, gamma);
            take<E>(last, c, beta);
        }
        for (i64 first = blockIdx.y; first < pixels; first += PIXELS * gridDim.y) {
            float v[PIXELS][E], u[PIXELS][E];
#pragma unroll
            for (int k = 0; k < PIXELS; k++) {
                const i64 pixel = first + k * (i64)gridDim.y;
                if (pixel >= pixels) continue;
                const i64 at = (sample * pixels + pixel) * channels + c;
                take<E>(x, at, v[k]);
                if constexpr (IS_GRADIENT) take<E>(more, at, u[k]);
            }
#pragma unroll
            for (int k = 0; k < PIXELS; k++) {
                const i64 pixel = first + k * (i64)gridDim.y;
                if (pixel >= pixels) continue;
                for (int e = 0; e < E; e++) {
                    if constexpr (IS_GRADIENT) {
                        const float xhat = (u[k][e] - mean[e]) * rstd[e];
                        v[k][e] = rstd[e] * (v[k][e] * gamma[e] - g[e] - xhat * gx[e]);
                    } else {
                        v[k][e] = (v[k][e] - mean[e]) * rstd[e] * gamma[e] + beta[e];
                    }
                }
                put<E>(y, (sample * pixels + pixel) * channels + c, v[k]);
            }
        }
    }
}

KERNEL(group_norm) {
    if (WIDE) scale_pixels<8, false>(a);
    else scale_pixels<1, false>(a);
}
KERNEL(group_norm_grad_input) {
    if (WIDE) scale_pixels<8, true>(a);
    else scale_pixels<1, true>(a);
}

// Sums of channels over parts and samples, each times its sample's 1 / deviation, to the gradients of
// gamma and beta: a block for 32 channels. n = channels, parts of all samples, parts of a sample,
// channels of a group.
KERNEL(group_norm_grad_weight) {
    In<double> first(a.x[0]);
    In<double> second(a.x[1]);
    In<f32> rstds(a.x[2]);
    Out<T0> dgamma(a.y[0]);
    Out<T0> dbeta(a.y[1]);
    __shared__ double sums[2][8][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 channels = a.n[0], c = (i64)blockIdx.x * 32 + lane;
    double sum = 0, more = 0;
    if (c < channels) {
        const i64 groups = channels / a.n[3], group = c / a.n[3];
        for (i64 part = warp; part < a.n[1]; part += 8) {
            i64 rest;
            const i64 sample = divide(part, a.n[2], rest);
            sum += first.raw(part * channels + c);
            more += (double)rstds[sample * groups + group] * second.raw(part * channels + c);
        }
    }
    sums[0][warp][lane] = sum;
    sums[1][warp][lane] = more;
    __syncthreads();
    if (warp != 0 || c >= channels) return;
    for (int i = 1; i < 8; i++) {
        sum += sums[0][i][lane];
        more += sums[1][i][lane];
    }
    dgamma.set(c, (float)more);
    dbeta.set(c, (float)sum);
}
