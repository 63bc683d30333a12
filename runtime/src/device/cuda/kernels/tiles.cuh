// Tiles in shared memory, and what is computed with them by tensor cores.
//
// A row of a tile has HEAD halves, in chunks of 16 bytes. Chunk c of row r lies at c ^ r % 8, so
// that eight rows of one chunk meet in no bank, nor do the chunks of a row.

#define EACH_LANE 0xffffffffu
#define TILE 64 // rows

#ifdef __EMULATED_CUDA__
#define TILED_KERNEL(name, threads, blocks) KERNEL(name)
#else
// With so many threads a block, and so many blocks at a time, which bounds the registers.
#define TILED_KERNEL(name, threads, blocks)                                                      \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(const Args a)
#endif

template <int HEAD> DEVICE u32 place(int row, int chunk) {
    return (u32)(row * 2 * HEAD + ((chunk ^ (row & 7)) << 4));
}
// Bytes of so many rows.
template <int HEAD> DEVICE constexpr u32 bytes(int rows) { return (u32)(rows * 2 * HEAD); }
// Which row of 16 halves a lane names for a fragment, of 16 rows by 16 halves: for one of rows, so
// that the pairs of registers that a product takes are two chunks of eight rows, and for one of
// columns and for left factors, where they are two rows of eight of a chunk.
template <int HEAD> DEVICE u32 lane_of_rows(u32 lane) {
    return place<HEAD>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}
template <int HEAD> DEVICE u32 lane_of_columns(u32 lane) {
    return place<HEAD>(lane % 16, lane / 16);
}
// The same 16 k halves further along the rows. Tiles begin at multiples of 256.
DEVICE u32 along(u32 at, int k) { return (at ^ (u32)(k % 4 * 32)) + (u32)(k / 4 * 128); }

// The sizes of a call, and what is this thread's.
struct Sizes {
    int queries, heads, groups, dim, keys, valid_queries, valid_keys;
    int ahead; // query i sees keys up to i + ahead
    float scale;
    int value;  // width of values and results
    int window; // keys that a query sees
    int b, kv;
    int warp, lane, row, pair; // row of a fragment, and the first of its columns

    __device__ __forceinline__ Sizes(const Args &a) {
        queries = (int)a.n[1], heads = (int)a.n[2], groups = (int)a.n[3], dim = (int)a.n[4];
        keys = (int)a.n[5], valid_queries = (int)a.n[6], valid_keys = (int)a.n[7];
        ahead = (int)(a.n[8] - a.n[9]);
        scale = (float)a.f[0];
        value = HAS_VALUES ? (int)a.n[25] : dim;
        window = HAS_WINDOW ? (int)a.n[26] : 0;
        warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
        row = lane / 4, pair = 2 * (lane % 4);
    }
    // First element of a sequence's first row, and elements from row to row.
    __device__ __forceinline__ i64 query_begin(int g) const {
        return (((i64)b * queries * heads + kv) * groups + g) * dim;
    }
    __device__ __forceinline__ i64 key_begin() const { return ((i64)b * keys * heads + kv) * dim; }
    __device__ __forceinline__ u32 query_step() const { return (u32)(heads * groups * dim); }
    __device__ __forceinline__ u32 key_step() const { return (u32)(heads * dim); }
    // The same of results and values.
    __device__ __forceinline__ i64 out_begin(int g) const {
        return (((i64)b * queries * heads + kv) * groups + g) * value;
    }
    __device__ __forceinline__ i64 value_begin() const {
        return ((i64)b * keys * heads + kv) * value;
    }
    __device__ __forceinline__ u32 out_step() const { return (u32)(heads * groups * value); }
    __device__ __forceinline__ u32 value_step() const { return (u32)(heads * value); }
    // First row of log-sum-exps and products, which lie by sample, head and group, a multiple of
    // 64 of them for each.
    __device__ __forceinline__ i64 norms_begin(int g) const {
        return (((i64)b * heads + kv) * groups + g) * norms_step();
    }
    __device__ __forceinline__ u32 norms_step() const { return (u32)((queries + 63) / 64 * 64); }
};

// Scores in powers of two.
struct Scores {
    float in, out, slope; // a product is times `in`, and the result times `out`

    __device__ __forceinline__ Scores(const Args &a, const Sizes &h, float slope)
        : slope(slope * LOG2_E) {
        in = HAS_CAP ? 2.0f * LOG2_E * h.scale / (float)a.f[3] : h.scale * LOG2_E;
        out = HAS_CAP ? LOG2_E * (float)a.f[3] : 1.0f;
    }
    // Of a product over this distance from key to query, and what its slope by the scaled product
    // is times.
    __device__ __forceinline__ float of(float product, int distance, float &rate) const {
        const float off = HAS_SLOPES ? slope * (float)distance : 0.0f;
        rate = 1.0f;
        if (!HAS_CAP) return fmaf(product, in, -off);
        // tanh x = 1 - 2 / (exp(2 x) + 1)
        const float t = 1.0f - 2.0f * reciprocal(power_of_two(product * in) + 1.0f);
        rate = 1.0f - t * t;
        return fmaf(t, out, -off);
    }
};

// Brings tiles of ROWS rows, by all threads. What a thread copies of a tile are chunks of one
// column, or of every eighth one, every ROWS_AT_ONCE rows.
template <int HEAD, int ROWS, int THREADS, class T> struct Tiles {
    static constexpr int CHUNKS = HEAD > 128 ? 8 : HEAD / 8;
    static constexpr int COLUMNS = HEAD / 8 / CHUNKS;
    static constexpr int ROWS_AT_ONCE = THREADS / CHUNKS; // a multiple of 8
    const In<T> &x;
    const T *next; // the next tile
    u32 step;      // elements from row to row
    // Of this thread's first chunk: its row, where it is in memory and in the tile, and whether the
    // heads are that long.
    int row;
    u32 from, at;
    int inside; // columns of chunks that heads have

    // From element `begin` on, with heads of `dim` elements.
    __device__ __forceinline__ Tiles(const In<T> &x, i64 begin, u32 step, int dim)
        : x(x), next(x.p + begin), step(step) {
        const int chunk = (int)threadIdx.x % CHUNKS;
        row = (int)threadIdx.x / CHUNKS;
        from = (u32)row * step + 8 * chunk;
        at = place<HEAD>(row, chunk);
        inside = COLUMNS == 1 ? 8 * chunk < dim : (dim - 8 * chunk + 63) / 64;
    }
    // The next tile, of which so many rows are there, the others are zero; then on by so many
    // elements.
    __device__ __forceinline__ void bring(u32 to, int count, i64 on) {
#pragma unroll
        for (int i = 0; i < ROWS / ROWS_AT_ONCE; i++)
#pragma unroll
            for (int c = 0; c < COLUMNS; c++)
                copy_16(to + at + bytes<HEAD>(i * ROWS_AT_ONCE) + 128 * c,
                        next + (u32)(i * ROWS_AT_ONCE) * step + from + 64 * c,
                        c < inside && row < count - i * ROWS_AT_ONCE, x);
        next += on;
    }
};

// Four lanes have a chunk each, and get a word of each chunk: the lane's own of chunk i is `w[i]`.
// The other way it is the same.
DEVICE void turn(u32 *w, int lane) {
#pragma unroll
    for (int by = 1; by < 4; by *= 2)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int low = by == 1 ? 2 * i : i, high = low + by;
            const bool is_high = lane & by;
            const u32 got = __shfl_xor_sync(EACH_LANE, is_high ? w[low] : w[high], by);
            if (is_high) w[low] = got;
            else w[high] = got;
        }
}

// Fragments of a left factor's 16 M rows, from memory; zero outside.
template <int HEAD, int M, class T>
DEVICE void left_rows(u32 (*a)[HEAD / 16][4], const In<T> &x, i64 begin, u32 step, int first,
                      int count, int dim, const Sizes &h) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int c = 0; c < HEAD / 8; c += 4) {
                const int i = first + 16 * m + 8 * half + h.row, d = 8 * (c + h.lane % 4);
                Quad q = {{0, 0, 0, 0}};
                if (i < count && d < dim) q = eight(x, begin + (i64)i * step + d);
                turn(q.w, h.lane);
#pragma unroll
                for (int j = 0; j < 4; j++) a[m][(c + j) / 2][half + 2 * (j % 2)] = q.w[j];
            }
}

// Results of a block from row `first` on to memory, 16 M rows of each warp, each row times its
// factor. Whose they are is found anew, so that addresses take no registers before.
template <int HEAD, int M, class T>
DEVICE void store_rows(const Out<T> &y, float (*c)[HEAD / 8][4], i64 begin, u32 step, int first,
                       int count, int dim, const float (*by)[2]) {
    const u32 thread = this_thread();
    const int lane = (int)(thread % 32);
    first += (int)(thread / 32 * 16 * M + thread % 32 / 4);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int n = 0; n < HEAD / 8; n += 4) {
                const int i = first + 16 * m + 8 * half, d = 8 * (n + lane % 4);
                const float f = by[m][half];
                Quad q;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float *of = c[m][n + j] + 2 * half;
                    q.w[j] = pack(of[0] * f, of[1] * f, T());
                }
                turn(q.w, lane);
                if (i < count && d < dim) set_eight(y, begin + (i64)i * step + d, q);
            }
}

template <int M, int N> DEVICE void clear(float (*c)[N][4]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) c[m][n][e] = 0.0f;
}

// c += a b at step k of the head dim, where b's columns are the 8 N rows at `at`.
template <int HEAD, int M, int N, class T>
DEVICE void by_rows(float (*c)[N][4], const u32 (*a)[4], u32 at, int k, T type) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        u32 b[4];
        load_matrices(b, along(at, k) + bytes<HEAD>(8 * n));
#pragma unroll
        for (int m = 0; m < M; m++) {
            mma(c[m][n], a[m], b[0], b[1], type);
            mma(c[m][n + 1], a[m], b[2], b[3], type);
        }
    }
}

// c += a b, where b is 16 rows from row `row` of the tile at `at` on.
template <int HEAD, int M, class T>
DEVICE void by_columns(float (*c)[HEAD / 8][4], const u32 (*a)[4], u32 at, int row, T type) {
#pragma unroll
    for (int n = 0; n < HEAD / 8; n += 2) {
        u32 b[4];
        load_transposed(b, along(at, n / 2) + bytes<HEAD>(row));
#pragma unroll
        for (int m = 0; m < M; m++) {
            mma(c[m][n], a[m], b[0], b[1], type);
            mma(c[m][n + 1], a[m], b[2], b[3], type);
        }
    }
}

// Two results beside each other as the left factor of the next product.
template <class T> DEVICE void as_left(u32 *a, const float (*c)[4], T type) {
    a[0] = pack(c[0][0], c[0][1], type);
    a[1] = pack(c[0][2], c[0][3], type);
    a[2] = pack(c[1][0], c[1][1], type);
    a[3] = pack(c[1][2], c[1][3], type);
}
