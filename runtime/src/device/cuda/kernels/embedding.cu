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

// ids, dy to the table's gradient: a thread per element adds what its row's ids bring, in their
// order. n = elements of y, width, first row, rows, ids.
KERNEL(embedding_grad) {
    In<i32> ids(a.x[0]);
    In<T1> dy(a.x[1]);
    Out<O0> y(a.y[0]);
    FOR_EACH(i, a.n[0]) {
        i64 row = i / a.n[1], column = i % a.n[1], id = row + a.n[2];
        float sum = 0;
        if (row < a.n[3])
            for (i64 at = 0; at < a.n[4]; at++)
                if (ids.raw(at) == id) sum += dy[at * a.n[1] + column];
        y.set(i, sum);
    }
}
