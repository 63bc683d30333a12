// Elements in other places. `T0` is an unsigned integer of the elements' size.

// Copies a box of elements: n = elements, rank, first element of x, first element of y, then for
// each dim extent, stride in x, shift, bound and stride in y. Element `index` comes from
// `index + shift` of x, and is zero where that is not in 0..bound.
KERNEL(move) {
    In<T0> x(a.x[0]);
    Out<T0> y(a.y[0]);
    FOR_EACH(i, a.n[0]) {
        i64 rest = i, from = a.n[2], to = a.n[3];
        bool inside = true;
        for (int d = (int)a.n[1] - 1; d >= 0; d--) {
            const i64 *dim = a.n + 4 + 5 * d;
            i64 index;
            rest = divide(rest, dim[0], index);
            const i64 source = index + dim[2];
            inside = inside && source >= 0 && source < dim[3];
            from += source * dim[1];
            to += index * dim[4];
        }
        y.raw(to, inside ? x.raw(from) : (T0)0);
    }
}

// Zeros past the valid lengths: n = elements, rank, then for each dim extent and valid length.
KERNEL(pad) {
    Out<T0> y(a.y[0]);
    FOR_EACH(i, a.n[0]) {
        i64 rest = i;
        bool inside = true;
        for (int d = (int)a.n[1] - 1; d >= 0; d--) {
            const i64 *dim = a.n + 2 + 2 * d;
            i64 index;
            rest = divide(rest, dim[0], index);
            inside = inside && index < dim[1];
        }
        if (!inside) y.raw(i, (T0)0);
    }
}
