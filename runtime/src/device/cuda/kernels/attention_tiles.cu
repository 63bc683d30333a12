// Attention by tensor cores, in the manner of FlashAttention-2: causal, sequences stored by
// position, grouped queries, bf16 or f16. Scores live in registers and are never kept.
//
// A block has 64 rows, 16 for each of its four warps: queries of a head in `attention_tiles` and
// `attention_tiles_grad_q`, keys in `attention_tiles_grad_kv`. It goes over tiles of the other side
// in shared memory, where what is summed over lies side by side, so that tiles which are summed
// over their rows are stored transposed too. Results of one product are, lane by lane, the left
// factor of the next one. No atomic additions: every sum has its order.
//
// n = as in attention.cu; the grid has tiles of rows, heads and samples. Head dims are multiples of
// 8, and of the kernel's HEAD the rest is zero.

#define ROWS 64
#define WARPS 4
// Rows of shared memory have 8 elements more, so that their lanes meet in no bank.
#define GAP 8
#define LOG2_E 1.44269504f

struct Head {
    i64 batch, queries, heads, groups, dim, keys, valid_queries, valid_keys, first_query, first_key;
    float scale;
    i64 b, kv, g; // of this block
    int warp, lane, row, pair; // row of the fragment, and its columns

    __device__ __forceinline__ i64 query(i64 i) const {
        return (((b * queries + i) * heads + kv) * groups + g) * dim;
    }
    __device__ __forceinline__ i64 key(i64 j) const { return ((b * keys + j) * heads + kv) * dim; }
    __device__ __forceinline__ i64 row_of(i64 i) const {
        return ((b * queries + i) * heads + kv) * groups + g;
    }
    // By position: whether a query sees a key.
    __device__ __forceinline__ bool sees(i64 i, i64 j) const {
        return i < valid_queries && j < valid_keys && first_key + j <= first_query + i;
    }
};

DEVICE Head head_of(const Args &a) {
    Head h;
    h.batch = a.n[0], h.queries = a.n[1], h.heads = a.n[2], h.groups = a.n[3], h.dim = a.n[4];
    h.keys = a.n[5], h.valid_queries = a.n[6], h.valid_keys = a.n[7];
    h.first_query = a.n[8], h.first_key = a.n[9];
    h.scale = (float)a.f[0];
    h.b = blockIdx.z;
    h.kv = blockIdx.y % h.heads, h.g = blockIdx.y / h.heads;
    h.warp = (int)threadIdx.x / 32, h.lane = (int)threadIdx.x % 32;
    h.row = h.lane / 4, h.pair = 2 * (h.lane % 4);
    return h;
}

// The left factor's fragments of 16 rows, zero outside.
template <int HEAD, class T, class At>
DEVICE void left_rows(u32 (*a)[4], const In<T> &x, i64 first, i64 count, const Head &h, At at) {
#pragma unroll
    for (int k = 0; k < HEAD / 16; k++)
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const i64 i = first + h.row + 8 * (r % 2);
            const int d = 16 * k + h.pair + 8 * (r / 2);
            a[k][r] = i < count && d < h.dim ? two(x, at(i) + d) : 0;
        }
}

// A tile of rows to shared memory, and transposed where that is wanted; zero outside.
template <int HEAD, int TILE, class T, class At>
DEVICE void load_tile(T (*rows)[HEAD + GAP], T (*columns)[TILE + GAP], const In<T> &x, i64 first,
                      i64 count, const Head &h, At at) {
    for (int e = (int)threadIdx.x; e < TILE * HEAD / 8; e += ROWS / 16 * 32) {
        // Lanes go along the rows, which are next to each other in what is transposed.
        const int r = e % TILE, d = e / TILE * 8;
        Quad q = {{0, 0, 0, 0}};
        if (first + r < count && d < h.dim) q = eight(x, at(first + r) + d);
        if (rows) *(Quad *)&rows[r][d] = q;
        if (columns) {
#pragma unroll
            for (int k = 0; k < 8; k++) columns[d + k][r].bits = (u16)(q.w[k / 2] >> (16 * (k % 2)));
        }
    }
}

// c += a b, where b's columns are rows of shared memory from `first` on, 8 of them.
template <int DEPTH, int STRIDE, class T>
DEVICE void times(float *c, const u32 (*a)[4], const T (*b)[STRIDE], int first, const Head &h) {
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++) {
        const T *at = &b[first + h.row][16 * k + h.pair];
        mma(c, a[k], *(const u32 *)at, *(const u32 *)(at + 8), T());
    }
}

// Results of tiles beside each other as the left factor of the next product.
template <int TILE, class T> DEVICE void as_left(u32 (*a)[4], const float (*c)[4], T type) {
#pragma unroll
    for (int k = 0; k < TILE / 16; k++) {
        a[k][0] = pack(c[2 * k][0], c[2 * k][1], type);
        a[k][1] = pack(c[2 * k][2], c[2 * k][3], type);
        a[k][2] = pack(c[2 * k + 1][0], c[2 * k + 1][1], type);
        a[k][3] = pack(c[2 * k + 1][2], c[2 * k + 1][3], type);
    }
}

template <int HEAD, class T, class At>
DEVICE void store_rows(const Out<T> &y, const float (*c)[4], i64 first, i64 count, const Head &h,
                       At at, float by_upper, float by_lower) {
#pragma unroll
    for (int n = 0; n < HEAD / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const i64 i = first + h.row + 8 * (e / 2);
            const int d = 8 * n + h.pair + e % 2;
            if (i < count && d < h.dim) y.set(at(i) + d, c[n][e] * (e < 2 ? by_upper : by_lower));
        }
}

// Over the four lanes that share a row.
DEVICE float row_max(float v) {
    v = larger(v, __shfl_xor_sync(0xffffffffu, v, 1));
    return larger(v, __shfl_xor_sync(0xffffffffu, v, 2));
}
DEVICE float row_sum(float v) {
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

template <int HEAD> DEVICE void forward(const Args &a) {
    const int TILE = 64;
    In<T0> q(a.x[0]), k(a.x[1]), v(a.x[2]);
    Out<O0> o(a.y[0]);
    Out<O1> lse(a.y[1]);
    alignas(16) __shared__ T0 keys[TILE][HEAD + GAP];
    alignas(16) __shared__ T0 values[HEAD][TILE + GAP];
    const Head h = head_of(a);
    const i64 first = (i64)blockIdx.x * ROWS, mine = first + 16 * h.warp;
    auto query = [&](i64 i) { return h.query(i); };
    auto key = [&](i64 j) { return h.key(j); };
    u32 left[HEAD / 16][4], p[TILE / 16][4];
    left_rows<HEAD>(left, q, mine, h.queries, h, query);
    float acc[HEAD / 8][4], most[2] = {-INFINITE, -INFINITE}, sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < HEAD / 8; n++)
        for (int e = 0; e < 4; e++) acc[n][e] = 0.0f;
    const float scale = h.scale * LOG2_E;
    i64 n_keys = h.first_query + first + ROWS - h.first_key;
    if (n_keys > h.valid_keys) n_keys = h.valid_keys;
    for (i64 j0 = 0; j0 < n_keys; j0 += TILE) {
        __syncthreads();
        load_tile<HEAD, TILE>(keys, (T0(*)[TILE + GAP])0, k, j0, h.valid_keys, h, key);
        load_tile<HEAD, TILE>((T0(*)[HEAD + GAP])0, values, v, j0, h.valid_keys, h, key);
        __syncthreads();
        float s[TILE / 8][4];
#pragma unroll
        for (int n = 0; n < TILE / 8; n++) {
            for (int e = 0; e < 4; e++) s[n][e] = 0.0f;
            times<HEAD>(s[n], left, keys, 8 * n, h);
        }
        float now[2] = {most[0], most[1]};
#pragma unroll
        for (int n = 0; n < TILE / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const bool seen = h.sees(mine + h.row + 8 * (e / 2), j0 + 8 * n + h.pair + e % 2);
                s[n][e] = seen ? s[n][e] * scale : -INFINITE;
                now[e / 2] = larger(now[e / 2], s[n][e]);
            }
        float before[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            now[r] = row_max(now[r]);
            before[r] = most[r] == -INFINITE ? 0.0f : exp2f(most[r] - now[r]);
            most[r] = now[r];
            sum[r] *= before[r];
        }
#pragma unroll
        for (int n = 0; n < TILE / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                s[n][e] = s[n][e] == -INFINITE ? 0.0f : exp2f(s[n][e] - now[e / 2]);
                sum[e / 2] += s[n][e];
            }
        as_left<TILE>(p, s, T0());
#pragma unroll
        for (int n = 0; n < HEAD / 8; n++) {
            for (int e = 0; e < 4; e++) acc[n][e] *= before[e / 2];
            times<TILE>(acc[n], p, values, 8 * n, h);
        }
    }
    float by[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        sum[r] = row_sum(sum[r]);
        by[r] = sum[r] == 0.0f ? 0.0f : 1.0f / sum[r];
        const i64 i = mine + h.row + 8 * r;
        // From powers of two.
        if (h.pair == 0 && i < h.queries)
            lse.set(h.row_of(i), sum[r] == 0.0f ? -INFINITE : most[r] / LOG2_E + logf(sum[r]));
    }
    store_rows<HEAD>(o, acc, mine, h.queries, h, query, by[0], by[1]);
}

KERNEL(attention_tiles_64) { forward<64>(a); }
KERNEL(attention_tiles_128) { forward<128>(a); }

// o, do to their product of each row, in scratch memory y: a warp per row; n = rows, dim.
KERNEL(attention_delta) {
    In<T0> o(a.x[0]);
    In<T0> d_o(a.x[1]);
    Out<f32> y(a.y[0]);
    const i64 row = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= a.n[0]) return;
    float sum = 0;
    for (i64 d = threadIdx.x % 32; d < a.n[1]; d += 32)
        sum += o[row * a.n[1] + d] * d_o[row * a.n[1] + d];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) y.set(row, sum);
}

// Probability of a pair, from the scaled score and the row's log-sum-exp.
DEVICE float probability(float score, float lse, float scale, bool seen) {
    return seen && lse != -INFINITE ? exp2f(score * scale - lse * LOG2_E) : 0.0f;
}

// q, k, v, delta, lse, do to dq.
template <int HEAD, int TILE> DEVICE void grad_q(const Args &a) {
    In<T0> q(a.x[0]), k(a.x[1]), v(a.x[2]), d_o(a.x[5]);
    In<f32> delta(a.x[3]);
    In<T4> lse(a.x[4]);
    Out<O0> dq(a.y[0]);
    alignas(16) __shared__ T0 keys[TILE][HEAD + GAP];
    alignas(16) __shared__ T0 keys_t[HEAD][TILE + GAP];
    alignas(16) __shared__ T0 values[TILE][HEAD + GAP];
    const Head h = head_of(a);
    const i64 first = (i64)blockIdx.x * ROWS, mine = first + 16 * h.warp;
    auto query = [&](i64 i) { return h.query(i); };
    auto key = [&](i64 j) { return h.key(j); };
    u32 left[HEAD / 16][4], out[HEAD / 16][4], p[TILE / 16][4];
    left_rows<HEAD>(left, q, mine, h.queries, h, query);
    left_rows<HEAD>(out, d_o, mine, h.queries, h, query);
    float norm[2], slope[2], acc[HEAD / 8][4];
    for (int r = 0; r < 2; r++) {
        const i64 i = mine + h.row + 8 * r;
        norm[r] = i < h.queries ? lse[h.row_of(i)] : -INFINITE;
        slope[r] = i < h.queries ? delta[h.row_of(i)] : 0.0f;
    }
#pragma unroll
    for (int n = 0; n < HEAD / 8; n++)
        for (int e = 0; e < 4; e++) acc[n][e] = 0.0f;
    const float scale = h.scale * LOG2_E;
    i64 n_keys = h.first_query + first + ROWS - h.first_key;
    if (n_keys > h.valid_keys) n_keys = h.valid_keys;
    for (i64 j0 = 0; j0 < n_keys; j0 += TILE) {
        __syncthreads();
        load_tile<HEAD, TILE>(keys, keys_t, k, j0, h.valid_keys, h, key);
        load_tile<HEAD, TILE>(values, (T0(*)[TILE + GAP])0, v, j0, h.valid_keys, h, key);
        __syncthreads();
        float s[TILE / 8][4];
#pragma unroll
        for (int n = 0; n < TILE / 8; n++) {
            float dp[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            for (int e = 0; e < 4; e++) s[n][e] = 0.0f;
            times<HEAD>(s[n], left, keys, 8 * n, h);
            times<HEAD>(dp, out, values, 8 * n, h);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const bool seen = h.sees(mine + h.row + 8 * (e / 2), j0 + 8 * n + h.pair + e % 2);
                s[n][e] = probability(s[n][e], norm[e / 2], scale, seen) * (dp[e] - slope[e / 2]);
            }
        }
        as_left<TILE>(p, s, T0());
#pragma unroll
        for (int n = 0; n < HEAD / 8; n++) times<TILE>(acc[n], p, keys_t, 8 * n, h);
    }
    store_rows<HEAD>(dq, acc, mine, h.queries, h, query, h.scale, h.scale);
}

KERNEL(attention_tiles_grad_q_64) { grad_q<64, 64>(a); }
KERNEL(attention_tiles_grad_q_128) { grad_q<128, 32>(a); }

// The same to dk and dv; the grid has tiles of keys, heads of keys and samples.
template <int HEAD, int TILE> DEVICE void grad_kv(const Args &a) {
    In<T0> q(a.x[0]), k(a.x[1]), v(a.x[2]), d_o(a.x[5]);
    In<f32> delta(a.x[3]);
    In<T4> lse(a.x[4]);
    Out<O1> dk(a.y[1]);
    Out<O2> dv(a.y[2]);
    alignas(16) __shared__ T0 queries[TILE][HEAD + GAP];
    alignas(16) __shared__ T0 queries_t[HEAD][TILE + GAP];
    alignas(16) __shared__ T0 outs[TILE][HEAD + GAP];
    alignas(16) __shared__ T0 outs_t[HEAD][TILE + GAP];
    __shared__ float norms[TILE], slopes[TILE];
    Head h = head_of(a);
    const i64 first = (i64)blockIdx.x * ROWS, mine = first + 16 * h.warp;
    auto query = [&](i64 i) { return h.query(i); };
    auto key = [&](i64 j) { return h.key(j); };
    u32 left[HEAD / 16][4], value[HEAD / 16][4], p[TILE / 16][4];
    left_rows<HEAD>(left, k, mine, h.keys, h, key);
    left_rows<HEAD>(value, v, mine, h.keys, h, key);
    float acc_k[HEAD / 8][4], acc_v[HEAD / 8][4];
#pragma unroll
    for (int n = 0; n < HEAD / 8; n++)
        for (int e = 0; e < 4; e++) acc_k[n][e] = acc_v[n][e] = 0.0f;
    const float scale = h.scale * LOG2_E;
    // By position nothing before the first key sees it.
    i64 i0 = h.first_key + first - h.first_query;
    i0 = i0 > 0 ? i0 / TILE * TILE : 0;
    if (first >= h.valid_keys) i0 = h.valid_queries;
    for (; i0 < h.valid_queries; i0 += TILE)
        for (h.g = 0; h.g < h.groups; h.g++) {
            __syncthreads();
            load_tile<HEAD, TILE>(queries, queries_t, q, i0, h.valid_queries, h, query);
            load_tile<HEAD, TILE>(outs, outs_t, d_o, i0, h.valid_queries, h, query);
            for (int r = (int)threadIdx.x; r < TILE; r += WARPS * 32) {
                const bool is_there = i0 + r < h.valid_queries;
                norms[r] = is_there ? lse[h.row_of(i0 + r)] : -INFINITE;
                slopes[r] = is_there ? delta[h.row_of(i0 + r)] : 0.0f;
            }
            __syncthreads();
            float s[TILE / 8][4], ds[TILE / 8][4];
#pragma unroll
            for (int n = 0; n < TILE / 8; n++) {
                for (int e = 0; e < 4; e++) s[n][e] = ds[n][e] = 0.0f;
                times<HEAD>(s[n], left, queries, 8 * n, h);
                times<HEAD>(ds[n], value, outs, 8 * n, h);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int i = 8 * n + h.pair + e % 2;
                    const bool seen = h.sees(i0 + i, mine + h.row + 8 * (e / 2));
                    s[n][e] = probability(s[n][e], norms[i], scale, seen);
                    ds[n][e] = s[n][e] * (ds[n][e] - slopes[i]);
                }
            }
            as_left<TILE>(p, s, T0());
#pragma unroll
            for (int n = 0; n < HEAD / 8; n++) times<TILE>(acc_v[n], p, outs_t, 8 * n, h);
            as_left<TILE>(p, ds, T0());
#pragma unroll
            for (int n = 0; n < HEAD / 8; n++) times<TILE>(acc_k[n], p, queries_t, 8 * n, h);
        }
    store_rows<HEAD>(dk, acc_k, mine, h.keys, h, key, h.scale, h.scale);
    store_rows<HEAD>(dv, acc_v, mine, h.keys, h, key, 1.0f, 1.0f);
}

KERNEL(attention_tiles_grad_kv_64) { grad_kv<64, 64>(a); }
KERNEL(attention_tiles_grad_kv_128) { grad_kv<128, 32>(a); }
