// The gradient of attention by tensor cores; see attention_tiles.cu. Scores are computed again from
// the log-sum-exps, once for the queries' gradients and once for the keys' and values'.
//
// A block has rows of one side, 16 M for each of its warps, and goes over tiles of 64 rows of the
// other side, 16 at a time: scores of these become the next product's left factor where they are.
// The next tiles are on their way to the other half of shared memory meanwhile. Kernels for heads
// up to 64 have four warps with M = 2, so that what a warp loads is used twice; for longer heads
// there are no registers for that, and they have eight warps with M = 1. Rows of keys above 128 and
// of their values stay in shared memory. What is wholly before a window, or a window behind, is left
// out by 16 rows.

// o, lse and do, operands 3 to 5, to two numbers for each row, in scratch memory y: its log-sum-exp
// for powers of two, and the product of o and do, less the gradient of the log-sum-exp, operand 6,
// where it has one. Rows lie by sample, head and group there; after
// the last valid query they are such that their probabilities are zero. Eight or sixteen lanes have
// a row; the grid has rows and samples.
KERNEL(attention_delta) {
    In<T0> o(a.x[3]);
    In<f32> lse(a.x[4]);
    In<T0> d_o(a.x[5]);
    Out<f32> y(a.y[0]);
    Sizes h(a);
    h.b = (int)blockIdx.y;
    const u32 lanes = h.value <= 64 ? 8 : 16, heads = (u32)(h.heads * h.groups);
    const u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / lanes, d = threadIdx.x % lanes * 8;
    const u32 i = row / heads, head = row % heads;
    const bool is_there = i < (u32)h.valid_queries;
    const i64 at = ((i64)h.b * h.queries + i) * heads + head;
    float sum = 0.0f;
    if (is_there && d < (u32)h.value) {
        float x[8], z[8];
        load8(o, at * h.value + d, x);
        load8(d_o, at * h.value + d, z);
#pragma unroll
        for (int e = 0; e < 8; e++) sum += x[e] * z[e];
    }
    for (u32 mask = lanes / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(EACH_LANE, sum, mask);
    if (d > 0 || i >= h.norms_step()) return;
    const float norm = is_there ? lse[at] : -INFINITE;
    const i64 to = 2 * (((i64)h.b * heads + head) * h.norms_step() + i);
    y.set(to, norm == -INFINITE ? INFINITE : norm * LOG2_E);
    if (HAS_LSE_GRADIENT) {
        In<f32> d_lse(a.x[6]);
        if (is_there) sum -= d_lse[at];
    }
    y.set(to + 1, sum);
}

// q, k, v, norms, do to dq; the grid has tiles of queries, heads and samples.
template <int HEAD, int VALUE, int M, int WARPS> DEVICE void grad_q(const Args &a) {
    constexpr int ROWS = 16 * M * WARPS, THREADS = 32 * WARPS;
    constexpr int UNROLL = HEAD <= 128 ? 2 : 1; // as registers allow
    In<T0> q(a.x[0]), k(a.x[1]), v(a.x[2]), d_o(a.x[5]);
    In<f32> norms(a.x[3]);
    Out<O0> dq(a.y[0]);
    Sizes h(a);
    h.b = (int)blockIdx.z, h.kv = (int)blockIdx.y / h.groups;
    const int g = (int)blockIdx.y % h.groups;
    const int first = (int)(gridDim.x - 1 - blockIdx.x) * ROWS, mine = first + 16 * M * h.warp;
    int n_keys = first + ROWS + h.ahead;
    if (n_keys > h.valid_keys) n_keys = h.valid_keys;
    int first_j = 0; // as forward
    if (HAS_WINDOW && first + h.ahead >= h.window)
        first_j = (first + h.ahead - h.window + 1) / TILE * TILE;
    const u32 begin = shared_begin();
    const u32 for_rows = lane_of_rows<HEAD>(h.lane), for_columns = lane_of_columns<HEAD>(h.lane);
    const u32 for_values = lane_of_rows<VALUE>(h.lane);
    const i64 of_q = h.query_begin(g);

    const u32 step_k = h.key_step(), step_v = h.value_step(), step_q = h.query_step();
    const i64 of_k = h.key_begin() + (i64)first_j * step_k;
    const i64 of_v = h.value_begin() + (i64)first_j * step_v;
    Tiles<HEAD, TILE, THREADS, T0> keys(k, of_k, step_k, h.dim);
    Tiles<VALUE, TILE, THREADS, T0> values(v, of_v, step_v, h.value);
    int there = n_keys - first_j;
    constexpr u32 HALF = 2 * TILE * (HEAD + VALUE); // bytes of keys and values
    u32 here = begin;
    auto bring_both = [&](u32 to) {
        if (there > 0) {
            keys.bring(to, there, TILE * step_k);
            values.bring(to + bytes<HEAD>(TILE), there, TILE * step_v);
        }
        there -= TILE;
        end_group();
    };
    bring_both(here);
    u32 left[M][HEAD / 16][4], out[M][VALUE / 16][4];
    left_rows<HEAD, M>(left, q, of_q, step_q, mine, h.queries, h.dim, h);
    left_rows<VALUE, M>(out, d_o, h.out_begin(g), h.out_step(), mine, h.queries, h.value, h);
    float norm[M][2], slope[M][2], acc[M][HEAD / 8][4], by[M][2];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const u32 i = (u32)(mine + 16 * m + 8 * r + h.row);
            const bool is_there = i < h.norms_step();
            const i64 at = 2 * (h.norms_begin(g) + i);
            norm[m][r] = is_there ? norms[at] : INFINITE;
            slope[m][r] = is_there ? norms[at + 1] : 0.0f;
            by[m][r] = h.scale;
        }
    clear<M>(acc);
    const Scores score(a, h, slope_of(a, h.kv, g));
    const float scale = h.scale * LOG2_E;

    // 16 keys from row `c` of a tile on, which begins with key j0.
    auto add = [&](int j0, int c, bool has_mask) {
        const u32 at = here + bytes<HEAD>(c), at_k = at + for_rows;
        const u32 at_v = here + bytes<VALUE>(c) + for_values + bytes<HEAD>(TILE);
        float s[M][2][4], ds[M][2][4];
        clear<M>(s);
        clear<M>(ds);
#pragma unroll
        for (int step = 0; step < HEAD / 16; step++) {
            u32 some[M][4], others[M][4];
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    some[m][r] = left[m][step][r];
                    if (step < VALUE / 16) others[m][r] = out[m][step][r];
                }
            by_rows<HEAD, M>(s, some, at_k, step, T0());
            if (step < VALUE / 16) by_rows<VALUE, M>(ds, others, at_v, step, T0());
        }
        u32 p[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int last = mine + 16 * m + 8 * (e / 2) + h.row + h.ahead;
                const int from = last - j0 - c - h.pair; // keys from the lane's first to the query
                if (last > h.valid_keys - 1) last = h.valid_keys - 1;
                last -= j0 + c + h.pair;
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const int j = 8 * n + e % 2;
                    float rate = 1.0f;
                    if (IS_BENT) s[m][n][e] = score.of(s[m][n][e], from - j, rate);
                    if (has_mask && (j > last || (HAS_WINDOW && j <= from - h.window)))
                        s[m][n][e] = -INFINITE;
                    const float exponent = IS_BENT ? s[m][n][e] - norm[m][e / 2]
                                                   : fmaf(s[m][n][e], scale, -norm[m][e / 2]);
                    s[m][n][e] = power_of_two(exponent) * (ds[m][n][e] - slope[m][e / 2]);
                    if (HAS_CAP) s[m][n][e] *= rate;
                }
            }
            as_left(p[m], s[m], T0());
        }
        by_columns<HEAD, M>(acc, p, at + for_columns, 0, T0());
    };
    for (int j0 = first_j; j0 < n_keys; j0 += TILE) {
        wait_for_groups<0>();
        __syncthreads();
        bring_both(2 * begin + HALF - here);
        // Keys of the tile before the window of the warp's first query, and of its last.
        const int before = HAS_WINDOW ? mine + h.ahead - h.window + 1 - j0 : 0;
        const bool is_cut = HAS_WINDOW && before + 16 * M > 1;
        if (j0 + TILE <= mine + h.ahead + 1 && j0 + TILE <= h.valid_keys && !is_cut) {
#pragma unroll UNROLL
            for (int c = 0; c < TILE; c += 16) add(j0, c, false);
        } else {
            const int begin_c = before > 0 ? before / 16 * 16 : 0;
#pragma unroll 1
            for (int c = begin_c; c < TILE && j0 + c < mine + 16 * M + h.ahead; c += 16)
                add(j0, c, true);
        }
        here = 2 * begin + HALF - here;
    }
    wait_for_groups<0>();
    store_rows<HEAD, M>(dq, acc, of_q, step_q, first, h.queries, h.dim, by);
}

TILED_KERNEL(attention_tiles_grad_q_64, 128, 2) { grad_q<64, 64, 2, 4>(a); }
TILED_KERNEL(attention_tiles_grad_q_128, 256, 1) { grad_q<128, 128, 1, 8>(a); }
#if HAS_VALUES
TILED_KERNEL(attention_tiles_grad_q_192, 256, 1) { grad_q<192, 128, 1, 8>(a); }
#endif

// Where 16 rows of a tile of queries lie, as a lane names them for fragments of rows and of columns,
// and those of do, which are as far behind everywhere where they are as wide; and their numbers.
template <int HEAD, int VALUE> struct Places {
    static constexpr bool APART = HEAD != VALUE;
    u32 rows, columns, norms, apart_rows, apart_columns;

    __device__ __forceinline__ Places(u32 tile, u32 lane) {
        const u32 outs = tile + bytes<HEAD>(TILE);
        rows = tile + lane_of_rows<HEAD>(lane), columns = tile + lane_of_columns<HEAD>(lane);
        apart_rows = APART ? outs + lane_of_rows<VALUE>(lane) : 0;
        apart_columns = APART ? outs + lane_of_columns<VALUE>(lane) : 0;
        norms = outs + bytes<VALUE>(TILE) + 8 * 2 * (lane % 4);
    }
    __device__ __forceinline__ u32 out_rows() const {
        return APART ? apart_rows : rows + bytes<HEAD>(TILE);
    }
    __device__ __forceinline__ u32 out_columns() const {
        return APART ? apart_columns : columns + bytes<HEAD>(TILE);
    }
    __device__ __forceinline__ void go_on(int n) {
        rows += bytes<HEAD>(1) * n, columns += bytes<HEAD>(1) * n, norms += 8 * n;
        if (APART) apart_rows += bytes<VALUE>(1) * n, apart_columns += bytes<VALUE>(1) * n;
    }
};

// The same to dk and dv; the grid has tiles of keys, heads of keys and samples.
template <int HEAD, int VALUE, int M, int WARPS> DEVICE void grad_kv(const Args &a) {
    constexpr int ROWS = 16 * M * WARPS, THREADS = 32 * WARPS;
    constexpr bool KEEPS = HEAD <= 128;
    constexpr int UNROLL = M == 1 && KEEPS ? 4 : 1; // as registers allow
    constexpr u32 HALF = 2 * TILE * (HEAD + VALUE) + 8 * TILE; // bytes of queries, do and norms
    In<T0> q(a.x[0]), k(a.x[1]), v(a.x[2]), d_o(a.x[5]);
    In<f32> norms(a.x[3]);
    Out<O1> dk(a.y[1]);
    Out<O2> dv(a.y[2]);
    Sizes h(a);
    h.b = (int)blockIdx.z, h.kv = (int)blockIdx.y;
    const int first = (int)blockIdx.x * ROWS;
    const u32 own_rows = shared_begin(); // keys and values, where they are kept there
    const u32 begin = own_rows + (KEEPS ? 0 : bytes<HEAD>(ROWS) + bytes<VALUE>(ROWS));
    // The warp's first key. What follows from the thread's number is found anew where it is rare,
    // as all registers are taken.
    auto own = [&] { return first + (int)(this_thread() / 32 * 16 * M); };
    // By position nothing before the first key sees it.
    int begin_i = first - h.ahead;
    begin_i = begin_i > 0 ? begin_i / TILE * TILE : 0;
    const int end_i = first < h.valid_keys ? h.valid_queries : 0;
    // Nor does what is a window behind the last key.
    int stop_i = end_i;
    if (HAS_WINDOW && first + ROWS - 1 + h.window - h.ahead < stop_i)
        stop_i = first + ROWS - 1 + h.window - h.ahead;

    // Tiles of queries, each of all groups.
    const u32 step_q = h.query_step(), step_o = h.out_step(), step_n = 2 * h.norms_step();
    const i64 of_tile = h.query_begin(0) + (i64)begin_i * step_q;
    const i64 of_outs = h.out_begin(0) + (i64)begin_i * step_o;
    Tiles<HEAD, TILE, THREADS, T0> queries(q, of_tile, step_q, h.dim);
    Tiles<VALUE, TILE, THREADS, T0> outs(d_o, of_outs, step_o, h.value);
    const f32 *next_n = norms.p + 2 * (h.norms_begin(0) + begin_i);
    int next_i = begin_i, next_g = 0;
    u32 here = begin;
    auto bring_all = [&](u32 to) {
        const bool is_last = next_g + 1 == h.groups; // of a tile of all groups
        if (next_i < stop_i) {
            const i64 back = is_last ? (i64)h.groups : 0, on = is_last ? TILE : 0;
            const i64 on_q = h.dim + on * step_q - back * h.dim;
            const i64 on_o = h.value + on * step_o - back * h.value;
            queries.bring(to, end_i - next_i, on_q);
            outs.bring(to + bytes<HEAD>(TILE), end_i - next_i, on_o);
            if (threadIdx.x < TILE / 2)
                copy_16(to + bytes<HEAD>(TILE) + bytes<VALUE>(TILE) + 16 * threadIdx.x,
                        next_n + 4 * threadIdx.x, true, norms);
            next_n += step_n + 2 * on - back * step_n;
        }
        next_g = is_last ? 0 : next_g + 1;
        next_i += is_last ? TILE : 0;
        end_group();
    };
    const u32 step_k = h.key_step(), step_v = h.value_step();
    if constexpr (!KEEPS) {
        const i64 of_k = h.key_begin() + (i64)first * step_k;
        const i64 of_v = h.value_begin() + (i64)first * step_v;
        Tiles<HEAD, ROWS, THREADS, T0>(k, of_k, step_k, h.dim).bring(own_rows, h.keys - first, 0);
        Tiles<VALUE, ROWS, THREADS, T0>(v, of_v, step_v, h.value)
            .bring(own_rows + bytes<HEAD>(ROWS), h.keys - first, 0);
    }
    bring_all(here);
    u32 left[M][KEEPS ? HEAD / 16 : 1][4], value[M][KEEPS ? VALUE / 16 : 1][4];
    if constexpr (KEEPS) {
        left_rows<HEAD, M>(left, k, h.key_begin(), step_k, own(), h.keys, h.dim, h);
        left_rows<VALUE, M>(value, v, h.value_begin(), step_v, own(), h.keys, h.value, h);
    }
    float acc_k[M][HEAD / 8][4], acc_v[M][VALUE / 8][4];
    clear<M>(acc_k);
    clear<M>(acc_v);
    Scores score(a, h, 0.0f); // with the slope of a group's head
    const float scale = h.scale * LOG2_E;

    // 16 queries of a tile, where the lane has its fragments' rows and columns and its numbers;
    // for masks and distances, the first query of these that sees the lane's first key.
    auto add = [&](const Places<HEAD, VALUE> &at, bool has_mask, int first_seen) {
        float s[M][2][4], ds[M][2][4];
        clear<M>(s);
        clear<M>(ds);
#pragma unroll
        for (int step = 0; step < HEAD / 16; step++) {
            u32 some[M][4], others[M][4];
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int r = 0; r < 4 && KEEPS; r++) {
                    some[m][r] = left[m][step][r];
                    others[m][r] = value[m][step][r];
                }
            if constexpr (!KEEPS) {
                const u32 row = 16 * (this_thread() / 32), lane = this_lane();
                load_matrices(some[0], along(own_rows + lane_of_columns<HEAD>(lane), step) +
                                           bytes<HEAD>(1) * row);
                if (step < VALUE / 16)
                    load_matrices(others[0],
                                  along(own_rows + lane_of_columns<VALUE>(lane), step) +
                                      bytes<HEAD>(ROWS) + bytes<VALUE>(1) * row);
            }
            by_rows<HEAD, M>(s, some, at.rows, step, T0());
            if (step < VALUE / 16) by_rows<VALUE, M>(ds, others, at.out_rows(), step, T0());
        }
        float of_row[2][4]; // norm and product of two queries each
#pragma unroll
        for (int n = 0; n < 2; n++) load_pairs(of_row[n], at.norms + 8 * 8 * n);
        u32 p[M][4], dp[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int query = first_seen + 16 * m + 8 * (e / 2);
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const float *of = of_row[n] + 2 * (e % 2);
                    const int i = 8 * n + e % 2;
                    float rate = 1.0f;
                    if (IS_BENT) s[m][n][e] = score.of(s[m][n][e], i - query, rate);
                    if (has_mask && (i < query || (HAS_WINDOW && i >= query + h.window)))
                        s[m][n][e] = -INFINITE;
                    s[m][n][e] = power_of_two(IS_BENT ? s[m][n][e] - of[0]
                                                      : fmaf(s[m][n][e], scale, -of[0]));
                    ds[m][n][e] = s[m][n][e] * (ds[m][n][e] - of[1]);
                    if (HAS_CAP) ds[m][n][e] *= rate;
                }
            }
            as_left(p[m], s[m], T0());
            as_left(dp[m], ds[m], T0());
        }
        by_columns<VALUE, M>(acc_v, p, at.out_columns(), 0, T0());
        by_columns<HEAD, M>(acc_k, dp, at.columns, 0, T0());
    };
    for (;;) {
        const int i0 = next_g > 0 ? next_i : next_i - TILE; // of the tile before the next
        if (i0 >= stop_i) break;
        wait_for_groups<0>();
        __syncthreads();
        const int g = HAS_SLOPES ? (next_g > 0 ? next_g : h.groups) - 1 : 0;
        bring_all(2 * begin + HALF - here);
        const u32 lane = M == 1 ? (u32)h.lane : this_lane();
        const int mine = own();
        Places<HEAD, VALUE> at(here, lane);
        if (HAS_SLOPES) score.slope = LOG2_E * slope_of(a, h.kv, g);
        // The first query of the tile that sees the warp's first key, or the lane's.
        const int hidden = mine - h.ahead - i0;
        const int seen = hidden + (int)(lane / 4) - 2 * (int)(lane % 4);
        const bool is_cut = HAS_WINDOW && hidden + h.window < TILE;
        if (mine + 16 * M <= i0 + h.ahead + 1 && !is_cut) {
#pragma unroll UNROLL
            for (int c = 0; c < TILE; c += 16) {
                add(at, false, HAS_SLOPES ? seen - c : 0);
                at.go_on(16);
            }
        } else {
            // From the first 16 of which one sees a key on, to the last.
            const int begin_c = hidden > 0 ? hidden / 16 * 16 : 0;
            const int end_c = HAS_WINDOW ? hidden + 16 * M - 1 + h.window : TILE;
            at.go_on(begin_c);
#pragma unroll 1
            for (int c = begin_c; c < TILE && c < end_c; c += 16) {
                add(at, true, seen - c);
                at.go_on(16);
            }
        }
        here = 2 * begin + HALF - here;
    }
    wait_for_groups<0>();
    float by_k[M][2], by_v[M][2];
    for (int i = 0; i < 2 * M; i++) by_k[i / 2][i % 2] = h.scale, by_v[i / 2][i % 2] = 1.0f;
    store_rows<HEAD, M>(dk, acc_k, h.key_begin(), step_k, first, h.keys, h.dim, by_k);
    store_rows<VALUE, M>(dv, acc_v, h.value_begin(), step_v, first, h.keys, h.value, by_v);
}

TILED_KERNEL(attention_tiles_grad_kv_64, 128, 2) { grad_kv<64, 64, 2, 4>(a); }
TILED_KERNEL(attention_tiles_grad_kv_128, 256, 1) { grad_kv<128, 128, 1, 8>(a); }
#if HAS_VALUES
TILED_KERNEL(attention_tiles_grad_kv_192, 256, 1) { grad_kv<192, 128, 1, 8>(a); }
#endif
