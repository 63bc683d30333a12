// Products of matrices in general: an einsum whose dims are batch, rows, columns and inner ones.
//
//   y[batch, row, column] = sum over inner of l[batch, row, inner] * r[batch, inner, column]
//
// A block makes a tile of 64 x 64, a thread 4 x 4 of it; inner elements go by 16 at a time. The
// order of a sum is that of its inner elements, whatever the other extents.
//
// n = batches, rows, columns, inner elements, then the numbers of dims of these four groups,
// whether l and r are read along inner elements, and from 10 on the dims: of batches extent and
// strides in l, r and y; of rows extent and strides in l and y; of columns extent and strides in r
// and y; of inner elements extent and strides in l and r.

#define TILE 64
#define DEPTH 16

DEVICE void offsets(i64 i, const i64 *dims, int rank, i64 &first, i64 &second) {
    first = second = 0;
    for (int d = rank - 1; d >= 0; d--) {
        i64 index = rank == 1 ? i : i % dims[3 * d];
        first += index * dims[3 * d + 1];
        second += index * dims[3 * d + 2];
        i /= dims[3 * d];
    }
}

KERNEL(matmul) {
    In<T0> l(a.x[0]);
    In<T1> r(a.x[1]);
    Out<O0> y(a.y[0]);
    const i64 n_rows = a.n[1], n_cols = a.n[2], n_inner = a.n[3];
    const int of_batch = (int)a.n[4], of_rows = (int)a.n[5], of_cols = (int)a.n[6];
    const int of_inner = (int)a.n[7];
    const i64 *batch_dims = a.n + 10, *row_dims = batch_dims + 4 * of_batch;
    const i64 *col_dims = row_dims + 3 * of_rows, *inner_dims = col_dims + 3 * of_cols;

    __shared__ float ls[DEPTH][TILE + 1], rs[DEPTH][TILE + 1];
    __shared__ i64 l_rows[TILE], y_rows[TILE], r_cols[TILE], y_cols[TILE];
    __shared__ i64 l_inner[DEPTH], r_inner[DEPTH];

    i64 l_at = 0, r_at = 0, y_at = 0, rest = blockIdx.z;
    for (int d = of_batch - 1; d >= 0; d--) {
        const i64 *dim = batch_dims + 4 * d;
        i64 index = rest % dim[0];
        rest /= dim[0];
        l_at += index * dim[1];
        r_at += index * dim[2];
        y_at += index * dim[3];
    }
    const i64 row0 = (i64)blockIdx.y * TILE, col0 = (i64)blockIdx.x * TILE;
    const int t = (int)threadIdx.x, tr = t / 16, tc = t % 16;
    if (t < TILE) {
        offsets(row0 + t < n_rows ? row0 + t : 0, row_dims, of_rows, l_rows[t], y_rows[t]);
    } else if (t < 2 * TILE) {
        int c = t - TILE;
        offsets(col0 + c < n_cols ? col0 + c : 0, col_dims, of_cols, r_cols[c], y_cols[c]);
    }
    float sums[4][4];
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) sums[i][j] = 0.0f;
    for (i64 k0 = 0; k0 < n_inner; k0 += DEPTH) {
        if (t < DEPTH)
            offsets(k0 + t < n_inner ? k0 + t : 0, inner_dims, of_inner, l_inner[t], r_inner[t]);
        __syncthreads();
        for (int e = t; e < TILE * DEPTH; e += 256) {
            int k = a.n[8] ? e % DEPTH : e / TILE, i = a.n[8] ? e / DEPTH : e % TILE;
            bool is_in = k0 + k < n_inner && row0 + i < n_rows;
            ls[k][i] = is_in ? l[l_at + l_rows[i] + l_inner[k]] : 0.0f;
            k = a.n[9] ? e % DEPTH : e / TILE, i = a.n[9] ? e / DEPTH : e % TILE;
            is_in = k0 + k < n_inner && col0 + i < n_cols;
            rs[k][i] = is_in ? r[r_at + r_cols[i] + r_inner[k]] : 0.0f;
        }
        __syncthreads();
        for (int k = 0; k < DEPTH; k++) {
            float lv[4], rv[4];
            for (int i = 0; i < 4; i++) lv[i] = ls[k][tr + 16 * i];
            for (int j = 0; j < 4; j++) rv[j] = rs[k][tc + 16 * j];
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) sums[i][j] += lv[i] * rv[j];
        }
        __syncthreads();
    }
    // Without inner elements nothing has waited for the offsets.
    if (n_inner == 0) __syncthreads();
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            int row = tr + 16 * i, col = tc + 16 * j;
            if (row0 + row < n_rows && col0 + col < n_cols)
                y.set(y_at + y_rows[row] + y_cols[col], sums[i][j]);
        }
}
