// Attention by tensor cores, in the manner of FlashAttention-2: causal, sequences stored by
// position, grouped queries, bf16 or f16. Scores live in registers and are never kept.
//
// A block has 128 queries of a head, 32 for each of its four warps, and goes over tiles of 64 keys
// and of their values, which are brought to shared memory by turns, in a ring of SLOTS tiles. The
// last queries, which see most keys, come first. No atomic additions: every sum has its order.
//
// n = as in attention.cu; the grid has tiles of queries, heads and samples. Head dims are multiples
// of 8, and of the kernel's HEAD, or VALUE for values, the rest is zero. The scale is above zero.
// Tiles wholly before a window are left out, by the block and by each warp.

// Over the four lanes that share a row.
DEVICE float row_max(float v) {
    v = fmaxf(v, __shfl_xor_sync(EACH_LANE, v, 1));
    return fmaxf(v, __shfl_xor_sync(EACH_LANE, v, 2));
}
DEVICE float row_sum(float v) {
    v += __shfl_xor_sync(EACH_LANE, v, 1);
    return v + __shfl_xor_sync(EACH_LANE, v, 2);
}

// What has been seen of a warp's rows. Probabilities are times 2 to the power of -`most`, which is
// the largest score so far or smaller by at most SLACK: results have to be scaled again seldom.
template <int HEAD> struct Rows {
    static constexpr int SLACK = 8;
    float acc[2][HEAD / 8][4], most[2][2], sum[2][2];

    // Before the probabilities of these scores.
    __device__ __forceinline__ void look_at(const float (*s)[TILE / 8][4], float scale) {
        float now[2][2];
        bool grows = false;
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float v = s[m][0][2 * r];
#pragma unroll
                for (int n = 0; n < TILE / 8; n++)
                    v = fmaxf(v, fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
                now[m][r] = row_max(v) * scale;
                grows = grows || now[m][r] > most[m][r] + SLACK;
            }
        if (!__any_sync(EACH_LANE, grows)) return;
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float next = fmaxf(now[m][r], most[m][r]);
                const float by = next == -INFINITE ? 1.0f : power_of_two(most[m][r] - next);
                most[m][r] = next;
                sum[m][r] *= by;
#pragma unroll
                for (int n = 0; n < HEAD / 8; n++) {
                    acc[m][n][2 * r] *= by;
                    acc[m][n][2 * r + 1] *= by;
                }
            }
    }
    // Scores of 16 keys to probabilities, as the left factor of the next product.
    template <class T>
    __device__ __forceinline__ void take(u32 (*p)[4], float (*s)[TILE / 8][4], int step,
                                         float scale, T type) {
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float off = most[m][r] == -INFINITE ? 0.0f : -most[m][r];
#pragma unroll
                for (int n = 2 * step; n < 2 * step + 2; n++)
#pragma unroll
                    for (int e = 2 * r; e < 2 * r + 2; e++) {
                        s[m][n][e] = power_of_two(fmaf(s[m][n][e], scale, off));
                        sum[m][r] += s[m][n][e];
                    }
            }
            as_left(p[m], s[m] + 2 * step, type);
        }
    }
};

// The larger kernel has no registers left for its queries: they stay in shared memory.
template <int HEAD, int VALUE, int SLOTS> DEVICE void forward(const Args &a) {
    constexpr int ROWS = 128, THREADS = 128;
    constexpr bool KEEPS = HEAD <= 64;
    In<T0> q(a.x[0]), k(a.x[1]), v(a.x[2]);
    Out<O0> o(a.y[0]);
    Out<O1> lse(a.y[1]);
    Sizes h(a);
    h.b = (int)blockIdx.z, h.kv = (int)blockIdx.y / h.groups;
    const int g = (int)blockIdx.y % h.groups;
    const int first = (int)(gridDim.x - 1 - blockIdx.x) * ROWS, mine = first + 32 * h.warp;
    int n_keys = first + ROWS + h.ahead;
    if (n_keys > h.valid_keys) n_keys = h.valid_keys;
    int first_j = 0; // where the window of the first query begins, or a tile that has it
    if (HAS_WINDOW && first + h.ahead >= h.window)
        first_j = (first + h.ahead - h.window + 1) / TILE * TILE;
    const u32 begin = shared_begin();
    const u32 for_rows = lane_of_rows<HEAD>(h.lane), for_columns = lane_of_columns<HEAD>(h.lane);
    const u32 for_values = lane_of_columns<VALUE>(h.lane);
    const u32 ring = begin + (KEEPS ? 0 : bytes<HEAD>(ROWS)), end = ring + bytes<HEAD>(SLOTS * TILE);
    const i64 of_q = h.query_begin(g);

    const u32 step_k = h.key_step(), step_v = h.value_step(), step_q = h.query_step();
    const i64 of_k = h.key_begin() + (i64)first_j * step_k;
    const i64 of_v = h.value_begin() + (i64)first_j * step_v;
    Tiles<HEAD, TILE, THREADS, T0> keys(k, of_k, step_k, h.dim);
    Tiles<VALUE, TILE, THREADS, T0> values(v, of_v, step_v, h.value);
    int left_k = n_keys - first_j, left_v = left_k;
    auto bring_one = [&](bool is_key, u32 to) {
        int &there = is_key ? left_k : left_v;
        if (there > 0) {
            if (is_key) keys.bring(to, there, TILE * step_k);
            else values.bring(to, there, TILE * step_v);
        }
        there -= TILE;
        end_group();
    };
    if (!KEEPS) {
        const i64 from = of_q + (i64)first * step_q;
        Tiles<HEAD, ROWS, THREADS, T0>(q, from, step_q, h.dim).bring(begin, h.queries - first, 0);
    }
#pragma unroll
    for (int t = 0; t < SLOTS - 1; t++) bring_one(t % 2 == 0, ring + bytes<HEAD>(t * TILE));
    u32 here = ring, before = end - bytes<HEAD>(TILE);
    // To the next tile; the one before is free after all have come here.
    auto go_on = [&](bool is_key) {
        wait_for_groups<SLOTS - 2>();
        __syncthreads();
        bring_one(is_key == (SLOTS % 2 == 1), before);
        before = here;
        here = here + bytes<HEAD>(TILE) == end ? ring : here + bytes<HEAD>(TILE);
    };

    u32 left[2][KEEPS ? HEAD / 16 : 1][4];
    if constexpr (KEEPS)
        left_rows<HEAD, 2>(left, q, of_q, step_q, mine, h.queries, h.dim, h);
    Rows<VALUE> rows;
    clear<2>(rows.acc);
    for (int i = 0; i < 4; i++) rows.most[i / 2][i % 2] = -INFINITE, rows.sum[i / 2][i % 2] = 0.0f;
    const Scores score(a, h, slope_of(a, h.kv, g));
    const float scale = IS_BENT ? 1.0f : h.scale * LOG2_E;
    for (int j0 = first_j; j0 < n_keys; j0 += TILE) {
        bool sees = j0 < mine + 32 + h.ahead;
        if (HAS_WINDOW) sees = sees && j0 + TILE > mine + h.ahead - h.window + 1;
        float s[2][TILE / 8][4];
        go_on(true);
        if (sees) {
            const u32 at = before + for_rows;
            clear<2>(s);
#pragma unroll
            for (int step = 0; step < HEAD / 16; step++) {
                u32 some[2][4];
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    if constexpr (KEEPS)
                        for (int r = 0; r < 4; r++) some[m][r] = left[m][step][r];
                    else
                        load_matrices(some[m], along(begin + for_columns, step) +
                                                   bytes<HEAD>(32 * h.warp + 16 * m));
                }
                by_rows<HEAD, 2>(s, some, at, step, T0());
            }
            if constexpr (IS_BENT) {
#pragma unroll
                for (int m = 0; m < 2; m++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const int from = mine + 16 * m + 8 * (e / 2) + h.row + h.ahead - j0 - h.pair;
#pragma unroll
                        for (int n = 0; n < TILE / 8; n++) {
                            float rate;
                            s[m][n][e] = score.of(s[m][n][e], from - 8 * n - e % 2, rate);
                        }
                    }
            }
            const bool is_cut = HAS_WINDOW && j0 < mine + 32 + h.ahead - h.window;
            if (j0 + TILE > mine + h.ahead + 1 || j0 + TILE > h.valid_keys || is_cut) {
#pragma unroll
                for (int m = 0; m < 2; m++)
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        int last = mine + 16 * m + 8 * r + h.row + h.ahead;
                        const int before = last - h.window - j0 - h.pair;
                        if (last > h.valid_keys - 1) last = h.valid_keys - 1;
                        last -= j0 + h.pair;
#pragma unroll
                        for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                            for (int e = 0; e < 2; e++)
                                if (8 * n + e > last || (HAS_WINDOW && 8 * n + e <= before))
                                    s[m][n][2 * r + e] = -INFINITE;
                    }
            }
            rows.look_at(s, scale);
        }
        go_on(false);
        if (sees) {
#pragma unroll
            for (int step = 0; step < TILE / 16; step++) {
                u32 p[2][4];
                rows.take(p, s, step, scale, T0());
                by_columns<VALUE, 2>(rows.acc, p, before + for_values, 16 * step, T0());
            }
        }
    }
    wait_for_groups<0>();
    float by[2][2];
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float sum = row_sum(rows.sum[m][r]);
            by[m][r] = sum == 0.0f ? 0.0f : 1.0f / sum;
            const int i = mine + 16 * m + 8 * r + h.row;
            // From powers of two.
            if (h.pair == 0 && i < h.queries)
                lse.set((((i64)h.b * h.queries + i) * h.heads + h.kv) * h.groups + g,
                        sum == 0.0f ? -INFINITE : rows.most[m][r] / LOG2_E + logf(sum));
        }
    store_rows<VALUE, 2>(o, rows.acc, h.out_begin(g), h.out_step(), first, h.queries, h.value, by);
}

TILED_KERNEL(attention_tiles_64, 128, 2) { forward<64, 64, 4>(a); }
TILED_KERNEL(attention_tiles_128, 128, 2) { forward<128, 128, 3>(a); }
#if HAS_VALUES
TILED_KERNEL(attention_tiles_192, 128, 2) { forward<192, 128, 2>(a); }
#endif
