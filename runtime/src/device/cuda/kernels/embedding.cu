// Rows of a table by id, and the gradient for the table.

// table, ids to y: n = elements of y, width, first row, rows.
KERNEL(embedding) {
    In<T0> table(a.x[0]);
    In<i32> ids(a.x[1]);
    Out<O0> y(a.y[0]);
    FOR_EACH(i, a.n[0]) {
        i64 row = (i64)ids.raw(i / a.n[1]) - a.n[2];
        bool is_here = row >= 0 && row < a.n[3];
        y.set(i, is_here ? table[row * a.n[1] + i % a.n[1]] : 0.0f);
    }
}

// ids to the next place of the same id, -1 at the last; the sign of all but an id's first place is
// turned: -3 - next. n = ids.
KERNEL(embedding_chains) {
    In<i32> ids(a.x[0]);
    Out<i32> chains(a.y[0]);
    __shared__ i32 tile[256];
    const i64 n = a.n[0];
    // All threads of a block take part in loading, also those past the end.
    for (i64 i0 = (i64)blockIdx.x * blockDim.x; i0 < n; i0 += (i64)gridDim.x * blockDim.x) {
        const i64 i = i0 + threadIdx.x;
        const i32 id = i < n ? ids.raw(i) : 0;
        i64 next = -1;
        bool is_first = true;
        for (i64 j0 = 0; j0 < n; j0 += 256) {
            __syncthreads();
            if (j0 + threadIdx.x < n) tile[threadIdx.x] = ids.raw(j0 + threadIdx.x);
            __syncthreads();
            const int m = n - j0 < 256 ? (int)(n - j0) : 256;
            if (j0 + m <= i0) {
                for (int j = 0; j < m; j++) is_first = is_first && tile[j] != id;
            } else {
                for (int j = 0; j < m; j++) {
                    const i64 at = j0 + j;
                    if (tile[j] != id || at == i) continue;
                    if (at < i) is_first = false;
                    else if (next < 0) next = at;
                }
            }
        }
        if (i < n) chains.raw(i, is_first ? (i32)next : (i32)(-3 - next));
    }
}

// ids, dy, chains to the table's gradient, which is zero before: a block for each id adds what its
// places bring, in their order. n = ids, width, first row, rows.
KERNEL(embedding_grad) {
    In<i32> ids(a.x[0]);
    In<T1> dy(a.x[1]);
    In<i32> chains(a.x[2]);
    Out<O0> y(a.y[0]);
    const i64 width = a.n[1];
    for (i64 i = blockIdx.x; i < a.n[0]; i += gridDim.x) {
        const i64 row = (i64)ids.raw(i) - a.n[2];
        if (chains.raw(i) < -1 || row < 0 || row >= a.n[3]) continue;
        for (i64 c = threadIdx.x; c < width; c += blockDim.x) {
            float sum = 0;
            i64 at = i;
            while (at >= 0) {
                sum += dy[at * width + c];
                const i64 next = chains.raw(at);
                at = next < -1 ? -3 - next : next;
            }
            y.set(row * width + c, sum);
        }
    }
}
