// Products of small matrices by tensor cores: 16 x 16 times 16 x 8, factors in bf16 or f16, sums in
// f32. The instruction on a device, sums over what the lanes of the warp hold on the emulator.
//
// With g = lane / 4 and t = lane % 4, a lane holds
//   of A: rows g, g + 8, g, g + 8 at columns 2t, 2t, 2t + 8, 2t + 8, each with the column after it;
//   of B: rows 2t and 2t + 8, each with the row after it, of column g;
//   of the result: rows g, g, g + 8, g + 8 at columns 2t, 2t + 1, 2t, 2t + 1.

// Two numbers, rounded, the first in the lower half.
DEVICE u32 pack(float first, float second, bf16) {
#ifdef __EMULATED_CUDA__
    bf16 a, b;
    round_to(first, a);
    round_to(second, b);
    return (u32)a.bits | (u32)b.bits << 16;
#else
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
#endif
}
DEVICE u32 pack(float first, float second, f16) {
#ifdef __EMULATED_CUDA__
    f16 a, b;
    round_to(first, a);
    round_to(second, b);
    return (u32)a.bits | (u32)b.bits << 16;
#else
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
#endif
}

#ifdef __EMULATED_CUDA__
// What each lane of the warp has.
DEVICE void gather(u64 mine, u64 *all) {
    const u32 me = emulated_thread(), first = me / 32 * 32;
    emulated_block->slots[me] = mine;
    __syncwarp();
    for (int lane = 0; lane < 32; lane++) all[lane] = emulated_block->slots[first + lane];
    __syncwarp();
}
template <class T> DEVICE float half_of(u64 both, int which) {
    T half;
    half.bits = (u16)(both >> (16 * which));
    return widen(half);
}
template <class T> DEVICE void emulated_mma(float *c, const u32 *a, u32 b0, u32 b1) {
    u64 upper[32], lower[32], right[32];
    gather(a[0] | (u64)a[1] << 32, upper);
    gather(a[2] | (u64)a[3] << 32, lower);
    gather(b0 | (u64)b1 << 32, right);
    const int lane = (int)(emulated_thread() % 32), g = lane / 4, t = lane % 4;
    for (int e = 0; e < 4; e++) {
        const int row = g + 8 * (e / 2), column = 2 * t + e % 2;
        for (int k = 0; k < 16; k++) {
            const u64 *left = k < 8 ? upper : lower;
            float x = half_of<T>(left[row % 8 * 4 + k % 8 / 2], row / 8 * 2 + k % 2);
            float y = half_of<T>(right[column * 4 + k % 8 / 2], k / 8 * 2 + k % 2);
            c[e] += x * y;
        }
    }
}
DEVICE void mma(float *c, const u32 *a, u32 b0, u32 b1, bf16) { emulated_mma<bf16>(c, a, b0, b1); }
DEVICE void mma(float *c, const u32 *a, u32 b0, u32 b1, f16) { emulated_mma<f16>(c, a, b0, b1); }
#else
DEVICE void mma(float *c, const u32 *a, u32 b0, u32 b1, bf16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma(float *c, const u32 *a, u32 b0, u32 b1, f16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// Eight elements from `at` on, whose address is a multiple of 16.
template <class T> DEVICE Quad eight(const In<T> &x, i64 at) {
#ifdef __EMULATED_CUDA__
    x.at(at + 7);
    if ((u64)&x.at(at) % 16 != 0)
        emulated_block->fail("misaligned address of eight elements, at", (u64)at, x.count);
#endif
    return *(const Quad *)&x.at(at);
}
// Two elements from `at` on, whose address is a multiple of 4.
template <class T> DEVICE u32 two(const In<T> &x, i64 at) {
#ifdef __EMULATED_CUDA__
    x.at(at + 1);
#endif
    return *(const u32 *)&x.at(at);
}
