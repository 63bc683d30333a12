// Rows of a table by id, and the gradient for the table.
//
// The gradient of a row is the sum of what the places with its id bring. Places are sorted by row,
// those of a row in their order; then blocks add up pieces of the sorted list that are equally
// long, so that a frequent id is shared by many. All of it depends on the ids alone.

// table, ids to y: n = elements of y, width, first row, rows.
KERNEL(embedding) {
    In<T0> table(a.x[0]);
    In<i32> ids(a.x[1]);
    Out<O0> y(a.y[0]);
    if (WIDE) {
        FOR_EACH(i, a.n[0] / 8) {
            i64 c;
            const i64 place = divide(8 * i, a.n[1], c), row = (i64)ids.raw(place) - a.n[2];
            float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
            if (row >= 0 && row < a.n[3]) load8(table, row * a.n[1] + c, v);
            store8(y, 8 * i, v);
        }
        return;
    }
    FOR_EACH(i, a.n[0]) {
        i64 c;
        const i64 row = (i64)ids.raw(divide(i, a.n[1], c)) - a.n[2];
        bool is_here = row >= 0 && row < a.n[3];
        y.set(i, is_here ? table[row * a.n[1] + c] : 0.0f);
    }
}

// Sorting by digits of nine bits, the lowest first, keeps the order of equal ones.
#define DIGITS 512
// Places of a block: 128 of each of its eight warps.
#define TILE 1024

// The row of a place, of `rows`, the last of which is for ids that are not here: n[2] = first row,
// n[3] = rows, n[4] = bits that are sorted already; x[0] = ids, or keys from the second pass on.
DEVICE i32 key_of(const Args &a, const In<i32> &keys, i64 i) {
    if (a.n[4] > 0) return keys.raw(i);
    const i64 row = (i64)keys.raw(i) - a.n[2];
    return row >= 0 && row < a.n[3] ? (i32)row : (i32)a.n[3];
}

// ids or keys to the rank of each place among those of its tile with its digit, and to how many
// places of each digit and tile there are: n[0] = places, n[1] = tiles, further as key_of.
KERNEL(embedding_ranks) {
    In<i32> keys(a.x[0]);
    Out<i32> ranks(a.y[0]);
    Out<i32> counts(a.y[1]);
    __shared__ i32 before[8][DIGITS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 first = (i64)blockIdx.x * TILE + warp * (TILE / 8) + lane;
    for (int d = threadIdx.x; d < 8 * DIGITS; d += blockDim.x) before[d / DIGITS][d % DIGITS] = 0;
    __syncthreads();
    i32 rank[TILE / 256], digit[TILE / 256];
#pragma unroll
    for (int k = 0; k < TILE / 256; k++) {
        const i64 i = first + 32 * k;
        const bool is_place = i < a.n[0];
        digit[k] = is_place ? key_of(a, keys, i) >> a.n[4] & (DIGITS - 1) : DIGITS;
        int same = 0, earlier = 0;
        for (int other = 0; other < 32; other++) {
            const bool is_same = __shfl_sync(0xffffffffu, digit[k], other) == digit[k];
            same += is_same;
            earlier += is_same && other < lane;
        }
        const i32 sum = is_place ? before[warp][digit[k]] : 0;
        rank[k] = sum + earlier;
        __syncwarp();
        if (is_place && earlier == same - 1) before[warp][digit[k]] = sum + same;
        __syncwarp();
    }
    __syncthreads();
    for (int d = threadIdx.x; d < DIGITS; d += blockDim.x) {
        i32 sum = 0;
        for (int w = 0; w < 8; w++) {
            const i32 of_warp = before[w][d];
            before[w][d] = sum;
            sum += of_warp;
        }
        counts.raw(d * a.n[1] + blockIdx.x, sum);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < TILE / 256; k++)
        if (digit[k] < DIGITS) ranks.raw(first + 32 * k, rank[k] + before[warp][digit[k]]);
}

// Numbers to the sums of those before them, in place, by one block of 1024: n = numbers.
KERNEL(embedding_begins) {
    Out<i32> y(a.y[0]);
    __shared__ i32 sums[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i32 before = 0;
    for (i64 i0 = 0; i0 < a.n[0]; i0 += 4 * blockDim.x) {
        const i64 i = i0 + 4 * threadIdx.x;
        i32 v[4], own = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            v[k] = i + k < a.n[0] ? y.at(i + k) : 0;
            own += v[k];
        }
        i32 up_to = own; // with those of lower lanes
        for (int by = 1; by < 32; by *= 2) {
            const i32 lower = __shfl_sync(0xffffffffu, up_to, lane - by & 31);
            if (lane >= by) up_to += lower;
        }
        if (lane == 31) sums[warp] = up_to;
        __syncthreads();
        i32 sum = before + up_to - own;
        for (int w = 0; w < 32; w++) {
            if (w < warp) sum += sums[w];
            before += sums[w];
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (i + k < a.n[0]) y.raw(i + k, sum);
            sum += v[k];
        }
        __syncthreads();
    }
}

// ids or keys, places from the second pass on, ranks and where each digit of a tile begins, to keys
// and places by this digit: n as embedding_ranks.
KERNEL(embedding_sort) {
    In<i32> keys(a.x[0]);
    In<i32> places(a.x[1]);
    In<i32> ranks(a.x[2]);
    In<i32> begins(a.x[3]);
    Out<i32> sorted(a.y[0]);
    Out<i32> to(a.y[1]);
    FOR_EACH(i, a.n[0]) {
        const i32 key = key_of(a, keys, i), digit = key >> a.n[4] & (DIGITS - 1);
        const i64 at = begins.raw(digit * a.n[1] + i / TILE) + ranks.raw(i);
        sorted.raw(at, key);
        to.raw(at, a.n[4] > 0 ? places.raw(i) : (i32)i);
    }
}

// Entries of a piece.
#define PIECE 64

// E columns of a row from `c` on.
template <int E, class T> DEVICE void columns_of(const In<T> &x, i64 at, float *v) {
    if constexpr (E == 8) load8(x, at, v);
    else v[0] = x[at];
}
template <int E, class T> DEVICE void set_columns(const Out<T> &y, i64 at, const float *v) {
    if constexpr (E == 8) store8(y, at, v);
    else y.set(at, v[0]);
}

// A run of equal keys that ends in this piece, or with it, to its row; or to one of the piece's two
// partial sums, where it goes on in another piece.
template <int E>
DEVICE void end_run(const Args &a, const In<i32> &keys, i64 from, i64 to, i64 first, i64 last,
                    i64 c, const float *sum, bool &kept_first, bool &kept_last) {
    const i32 key = keys.raw(from);
    if (key >= a.n[2]) return;
    const i64 width = a.n[1], piece = first / PIECE;
    const bool began = from == first && first > 0 && keys.raw(first - 1) == key;
    const bool goes_on = to == last && last < a.n[0] && keys.raw(last) == key;
    if (!began && !goes_on) {
        Out<O0> y(a.y[0]);
        if (c < width) set_columns<E>(y, key * width + c, sum);
        return;
    }
    const bool is_first = from == first;
    Out<f32> parts(a.y[1]);
    if (c < width) set_columns<E>(parts, (2 * piece + !is_first) * width + c, sum);
    if (is_first) kept_first = true;
    else kept_last = true;
}

template <int E, class T> DEVICE void add_piece(const Args &a) {
    In<i32> keys(a.x[0]);
    In<i32> places(a.x[1]);
    In<T> x(a.x[2]);
    const i64 width = a.n[1], c = ((i64)blockIdx.y * blockDim.x + threadIdx.x) * E;
    const i64 first = (i64)blockIdx.x * PIECE;
    const i64 last = first + PIECE < a.n[0] ? first + PIECE : a.n[0];
    bool kept_first = false, kept_last = false;
    float sum[E];
    i64 begin = first;
    for (i64 i0 = first; i0 < last; i0 += 4) {
        // What four entries bring is on its way before the first is added.
        float v[4][E];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            for (int e = 0; e < E; e++) v[k][e] = 0;
            if (i0 + k >= last || c >= width) continue;
            const i64 place = places.raw(i0 + k);
            if (place >= 0) columns_of<E>(x, place * width + c, v[k]);
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const i64 i = i0 + k;
            if (i >= last) break;
            const bool begins = i == first || keys.raw(i) != keys.raw(i - 1);
            if (begins && i > first)
                end_run<E>(a, keys, begin, i, first, last, c, sum, kept_first, kept_last);
            if (begins) begin = i;
            for (int e = 0; e < E; e++) sum[e] = begins ? v[k][e] : sum[e] + v[k][e];
        }
    }
    end_run<E>(a, keys, begin, last, first, last, c, sum, kept_first, kept_last);
    if (threadIdx.x != 0 || blockIdx.y != 0 || gridDim.x == 1) return;
    // The partial sums are a list as this one is, half empty at most: an entry of a run that goes on
    // has its key, so that equal keys stay together.
    Out<i32> next_keys(a.y[2]);
    Out<i32> next_places(a.y[3]);
    const i64 at = 2 * (i64)blockIdx.x;
    const i32 none = (i32)a.n[2];
    next_keys.raw(at, kept_first ? keys.raw(first) : none);
    next_places.raw(at, kept_first ? (i32)at : -1);
    const bool is_one_run = kept_first && begin == first;
    next_keys.raw(at + 1, kept_last || is_one_run ? keys.raw(last - 1) : none);
    next_places.raw(at + 1, kept_last ? (i32)at + 1 : -1);
}

// Keys in order, the place of each, and rows at these places, to the sums of equal keys, in rows of
// the table's gradient, which is zero before; partial sums of runs that cross the ends of pieces go
// to y[1], two rows for a piece, with their keys and places: a list for the next call. A block adds
// up a piece; sums are of 64 terms at most, in their order. n = entries, width, rows of the table;
// other keys are passed over.
KERNEL(embedding_sum) {
    if (WIDE) add_piece<8, T0>(a);
    else add_piece<1, T0>(a);
}

// The same where the rows are the partial sums of such a call.
KERNEL(embedding_sum_parts) {
    if (WIDE) add_piece<8, f32>(a);
    else add_piece<1, f32>(a);
}
