// Elements in other places. `T0` is an unsigned integer of the elements' size, or `Quad` for those
// that are moved by 16 bytes.

// Elements of a box that a thread has under way.
#define ELEMENTS 4

template <class I> DEVICE void move_box(const Args &a) {
    In<T0> x(a.x[0]);
    Out<T0> y(a.y[0]);
    const I n = (I)a.n[0], threads = (I)gridDim.x * (I)blockDim.x;
    const int rank = (int)a.n[1];
    for (I i0 = (I)blockIdx.x * (I)blockDim.x + threadIdx.x; i0 < n; i0 += ELEMENTS * threads) {
        T0 v[ELEMENTS];
        I to[ELEMENTS];
#pragma unroll
        for (int k = 0; k < ELEMENTS; k++) {
            I rest = i0 + (I)k * threads, from = (I)a.n[2];
            const bool is_mine = rest < n;
            bool inside = is_mine;
            to[k] = (I)a.n[3];
            for (int d = rank - 1; d >= 0; d--) {
                const i64 *dim = a.n + 5 + 5 * d;
                // The outermost index is what is left.
                const I extent = (I)dim[0], above = d > 0 ? rest / extent : 0;
                const I index = rest - above * extent, source = index + (I)dim[2];
                inside = inside && source < (I)dim[3]; // unsigned: also for those below 0
                from += source * (I)dim[1];
                to[k] += index * (I)dim[4];
                rest = above;
            }
            v[k] = T0();
            if (inside) v[k] = x.raw(from);
        }
#pragma unroll
        for (int k = 0; k < ELEMENTS; k++)
            if (i0 + (I)k * threads < n) y.raw(to[k], v[k]);
    }
}

// Copies a box of elements: n = elements, rank, first element of x, first element of y, whether
// all numbers have 31 bits, then for each dim extent, stride in x, shift, bound and stride in y.
// Element `index` comes from `index + shift` of x, and is zero where that is not in 0..bound.
KERNEL(move) {
    if (a.n[4]) move_box<u32>(a);
    else move_box<u64>(a);
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
        if (!inside) y.raw(i, T0());
    }
}

// y = x by words of four bytes: n = words.
JOINED_KERNEL(words) {
    In<u32> x(a.x[0]);
    Out<u32> y(a.y[0]);
    const i64 n = a.n[0];
    FOR_MINE(i, n) y.raw(i, x.raw(i));
}
