// The gradient of attention by tensor cores; see attention_tiles.cu. Scores are computed again from
// the log-sum-exps, once for the queries' gradients and once for the keys' and values'.
//
// A block has rows of one side, 16 M for each of its warps, and goes over tiles of 64 rows of the
// other side, 16 at a time: scores of these become the next product's left factor where they are.
// The next tiles are on their way to the other half of shared memory meanwhile. Kernels for heads
// up to 64 have four warps with M = 2, so that what a warp loads is used twice; for longer heads
// there are no registers for that, and they have eight warps with M = 1.

// o, lse and do, operands 3 to 5, to two numbers for each row, in scratch memory y: its log-sum-exp
// for powers of two, and the product of o and do. Rows lie by sample, head and group there; after
// the last valid query they are such that their probabilities are zero. Eight or sixteen lanes have
// a row; the grid has rows and samples.
KERNEL(attention_delta) {
    In<T0> o(a.x[3]);
    In<f32> lse(a.x[4]);
    In<T0> d_o(a.x[5]);
    Out<f32> y(a.y[0]);
    Sizes h(a);
    h.b = (int)blockIdx.y;
    const u32 lanes = h.dim <= 64 ? 8 : 16, heads = (u32)(h.heads * h.groups);
    const u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / lanes, d = threadIdx.x % lanes * 8;
    const u32 i = row / heads, head = row % heads;
    const bool is_there = i < (u32)h.valid_queries;
    const i64 at = ((i64)h.b * h.queries + i) * heads + head;
    float sum = 0.0f;
    if (is_there && d < (u32)h.dim) {
        float x[8], z[8];
        load8(o, at * h.dim + d, x);
        load8(d_o, at * h.dim + d, z);
#pragma unroll
        for (int e = 0; e < 8; e++) sum += x[e] * z[e];
    }
    for (u32 mask = lanes / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(EACH_LANE, sum, mask);
    if (d > 0 || i >= h.norms_step()) return;
    const float norm = is_there ? lse[at] : -INFINITE;
    const i64 to = 2 * (((i64)h.b * heads + head) * h.norms_step() + i);
    y.set(to, norm == -INFINITE ? INFINITE : norm * LOG2_E);
    y.set(to + 1, sum);
}

// q, k, v, norms, do to dq; the grid has tiles of queries, heads and samples.
template <int HEAD, int M, int WARPS> DEVICE void grad_q(const Args &a) {
    constexpr int ROWS = 16 * M * WARPS, THREADS = 32 * WARPS;
    In<T0> q(a.x[0]), k(a.x[1]), v(a.x[2]), d_o(a.x[5]);
    In<f32> norms(a.x[3]);
    Out<O0> dq(a.y[0]);
    Sizes h(a);
    h.b = (int)blockIdx.z, h.kv = (int)blockIdx.y / h.groups;
    const int g = (int)blockIdx.y % h.groups;
    const int first = (int)(gridDim.x - 1 - blockIdx.x) * ROWS, mine = first + 16 * M * h.warp;
    int n_keys = first + ROWS + h.ahead;
    if (n_keys > h.valid_keys) n_keys = h.valid_keys;
    const u32 begin = shared_begin();
    const u32 for_rows = lane_of_rows<HEAD>(h.lane), for_columns = lane_of_columns<HEAD>(h.lane);
    const i64 of_q = h.query_begin(g);

    const u32 step_k = h.key_step(), step_q = h.query_step();
    Tiles<HEAD, TILE, THREADS, T0> keys(k, h.key_begin(), step_k, h.dim);
    Tiles<HEAD, TILE, THREADS, T0> values(v, h.key_begin(), step_k, h.dim);
    int there = n_keys;
    constexpr u32 HALF = 2 * 2 * TILE * HEAD; // bytes of keys and values
    u32 here = begin;
    auto bring_both = [&](u32 to) {
        if (there > 0) {
            keys.bring(to, there, TILE * step_k);
            values.bring(to + bytes<HEAD>(TILE), there, TILE * step_k);
        }
        there -= TILE;
        end_group();
    };
    bring_both(here);
    u32 left[M][HEAD / 16][4], out[M][HEAD / 16][4];
    left_rows<HEAD, M>(left, q, of_q, step_q, mine, h.queries, h);
    left_rows<HEAD, M>(out, d_o, of_q, step_q, mine, h.queries, h);
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
    const float scale = h.scale * LOG2_E;

    // 16 keys from row `c` of a tile on, which begins with key j0.
    auto add = [&](int j0, int c, bool has_mask) {
        const u32 at = here + bytes<HEAD>(c), at_k = at + for_rows, at_v = at_k + bytes<HEAD>(TILE);
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
                    others[m][r] = out[m][step][r];
                }
            by_rows<HEAD, M>(s, some, at_k, step, T0());
            by_rows<HEAD, M>(ds, others, at_v, step, T0());
        }
        u32 p[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int last = mine + 16 * m + 8 * (e / 2) + h.row + h.ahead;
                if (last > h.valid_keys - 1) last = h.valid_keys - 1;
                last -= j0 + c + h.pair;
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    if (has_mask && 8 * n + e % 2 > last) s[m][n][e] = -INFINITE;
                    const float prob = power_of_two(fmaf(s[m][n][e], scale, -norm[m][e / 2]));
                    s[m][n][e] = prob * (ds[m][n][e] - slope[m][e / 2]);
                }
            }
            as_left(p[m], s[m], T0());
        }
        by_columns<HEAD, M>(acc, p, at + for_columns, 0, T0());
    };
    for (int j0 = 0; j0 < n_keys; j0 += TILE) {
        wait_for_groups<0>();
        __syncthreads();
        bring_both(2 * begin + HALF - here);
        if (j0 + TILE <= mine + h.ahead + 1 && j0 + TILE <= h.valid_keys) {
#pragma unroll 2
            for (int c = 0; c < TILE; c += 16) add(j0, c, false);
        } else {
#pragma unroll 1
            for (int c = 0; c < TILE && j0 + c < mine + 16 * M + h.ahead; c += 16) add(j0, c, true);
        }
        here = 2 * begin + HALF - here;
    }
    wait_for_groups<0>();
    store_rows<HEAD, M>(dq, acc, of_q, step_q, first, h.queries, h.dim, by);
}

TILED_KERNEL(attention_tiles_grad_q_64, 128, 2) { grad_q<64, 2, 4>(a); }
TILED_KERNEL(attention_tiles_grad_q_128, 256, 1) { grad_q<128, 1, 8>(a); }

// The same to dk and dv; the grid has tiles of keys, heads of keys and samples.
template <int HEAD, int M, int WARPS> DEVICE void grad_kv(const Args &a) {
    constexpr int ROWS = 16 * M * WARPS, THREADS = 32 * WARPS;
    constexpr int UNROLL = M == 1 ? 4 : 1; // as registers allow
    constexpr u32 HALF = 2 * 2 * TILE * HEAD + 8 * TILE; // bytes of queries, do and norms
    In<T0> q(a.x[0]), k(a.x[1]), v(a.x[2]), d_o(a.x[5]);
    In<f32> norms(a.x[3]);
    Out<O1> dk(a.y[1]);
    Out<O2> dv(a.y[2]);
    Sizes h(a);
    h.b = (int)blockIdx.z, h.kv = (int)blockIdx.y;
    const int first = (int)blockIdx.x * ROWS;
    const u32 begin = shared_begin();
    // The warp's first key. What follows from the thread's number is found anew where it is rare,
    // as all registers are taken.
    auto own = [&] { return first + (int)(this_thread() / 32 * 16 * M); };
    // By position nothing before the first key sees it.
    int begin_i = first - h.ahead;
    begin_i = begin_i > 0 ? begin_i / TILE * TILE : 0;
    const int end_i = first < h.valid_keys ? h.valid_queries : 0;

    // Tiles of queries, each of all groups.
    const u32 step_q = h.query_step(), step_k = h.key_step(), step_n = 2 * h.norms_step();
    const i64 of_tile = h.query_begin(0) + (i64)begin_i * step_q;
    Tiles<HEAD, TILE, THREADS, T0> queries(q, of_tile, step_q, h.dim);
    Tiles<HEAD, TILE, THREADS, T0> outs(d_o, of_tile, step_q, h.dim);
    const f32 *next_n = norms.p + 2 * (h.norms_begin(0) + begin_i);
    int next_i = begin_i, next_g = 0;
    u32 here = begin;
    auto bring_all = [&](u32 to) {
        const bool is_last = next_g + 1 == h.groups; // of a tile of all groups
        if (next_i < end_i) {
            const i64 back = is_last ? (i64)h.groups : 0, on = is_last ? TILE : 0;
            const i64 on_q = h.dim + on * step_q - back * h.dim;
            queries.bring(to, end_i - next_i, on_q);
            outs.bring(to + bytes<HEAD>(TILE), end_i - next_i, on_q);
            if (threadIdx.x < TILE / 2)
                copy_16(to + bytes<HEAD>(2 * TILE) + 16 * threadIdx.x, next_n + 4 * threadIdx.x,
                        true, norms);
            next_n += step_n + 2 * on - back * step_n;
        }
        next_g = is_last ? 0 : next_g + 1;
        next_i += is_last ? TILE : 0;
        end_group();
    };
    bring_all(here);
    u32 left[M][HEAD / 16][4], value[M][HEAD / 16][4];
    left_rows<HEAD, M>(left, k, h.key_begin(), step_k, own(), h.keys, h);
    left_rows<HEAD, M>(value, v, h.key_begin(), step_k, own(), h.keys, h);
    float acc_k[M][HEAD / 8][4], acc_v[M][HEAD / 8][4];
    clear<M>(acc_k);
    clear<M>(acc_v);
    const float scale = h.scale * LOG2_E;

    // 16 queries of a tile, where the lane has its fragments' rows and columns and its numbers;
    // for masks, the first query of these that sees the lane's first key.
    auto add = [&](u32 at_rows, u32 at_columns, u32 at_norms, bool has_mask, int first_seen) {
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
                    others[m][r] = value[m][step][r];
                }
            by_rows<HEAD, M>(s, some, at_rows, step, T0());
            by_rows<HEAD, M>(ds, others, at_rows + bytes<HEAD>(TILE), step, T0());
        }
        float of_row[2][4]; // norm and product of two queries each
#pragma unroll
        for (int n = 0; n < 2; n++) load_pairs(of_row[n], at_norms + 8 * 8 * n);
        u32 p[M][4], dp[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int query = first_seen + 16 * m + 8 * (e / 2);
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const float *of = of_row[n] + 2 * (e % 2);
                    if (has_mask && 8 * n + e % 2 < query) s[m][n][e] = -INFINITE;
                    s[m][n][e] = power_of_two(fmaf(s[m][n][e], scale, -of[0]));
                    ds[m][n][e] = s[m][n][e] * (ds[m][n][e] - of[1]);
                }
            }
            as_left(p[m], s[m], T0());
            as_left(dp[m], ds[m], T0());
        }
        by_columns<HEAD, M>(acc_v, p, at_columns + bytes<HEAD>(TILE), 0, T0());
        by_columns<HEAD, M>(acc_k, dp, at_columns, 0, T0());
    };
    for (;;) {
        const int i0 = next_g > 0 ? next_i : next_i - TILE; // of the tile before the next
        if (i0 >= end_i) break;
        wait_for_groups<0>();
        __syncthreads();
        bring_all(2 * begin + HALF - here);
        const u32 lane = M == 1 ? (u32)h.lane : this_lane();
        const int mine = own();
        u32 rows = here + lane_of_rows<HEAD>(lane), columns = here + lane_of_columns<HEAD>(lane);
        u32 numbers = here + bytes<HEAD>(2 * TILE) + 8 * 2 * (lane % 4);
        if (mine + 16 * M <= i0 + h.ahead + 1) {
#pragma unroll UNROLL
            for (int c = 0; c < TILE; c += 16) {
                add(rows, columns, numbers, false, 0);
                rows += bytes<HEAD>(16), columns += bytes<HEAD>(16), numbers += 8 * 16;
            }
        } else {
            // From the first 16 of which one sees a key on.
            const int hidden = mine - h.ahead - i0, begin_c = hidden > 0 ? hidden / 16 * 16 : 0;
            const int seen = hidden + (int)(lane / 4) - 2 * (int)(lane % 4);
            rows += bytes<HEAD>(1) * begin_c, columns += bytes<HEAD>(1) * begin_c;
            numbers += 8 * begin_c;
#pragma unroll 1
            for (int c = begin_c; c < TILE; c += 16) {
                add(rows, columns, numbers, true, seen - c);
                rows += bytes<HEAD>(16), columns += bytes<HEAD>(16), numbers += 8 * 16;
            }
        }
        here = 2 * begin + HALF - here;
    }
    wait_for_groups<0>();
    float by_k[M][2], by_v[M][2];
    for (int i = 0; i < 2 * M; i++) by_k[i / 2][i % 2] = h.scale, by_v[i / 2][i % 2] = 1.0f;
    store_rows<HEAD, M>(dk, acc_k, h.key_begin(), step_k, first, h.keys, h.dim, by_k);
    store_rows<HEAD, M>(dv, acc_v, h.key_begin(), step_k, first, h.keys, h.dim, by_v);
}

TILED_KERNEL(attention_tiles_grad_kv_64, 128, 2) { grad_kv<64, 2, 4>(a); }
TILED_KERNEL(attention_tiles_grad_kv_128, 256, 1) { grad_kv<128, 1, 8>(a); }
