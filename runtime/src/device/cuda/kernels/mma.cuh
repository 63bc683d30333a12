// The thin layer under kernels for tensor cores, each part with a body for a device and one for the
// emulator: products of small matrices, 16 x 16 times 16 x 8, factors in bf16 or f16, sums in f32;
// fragments from shared memory; copies to it that go on beside the work.
//
// With g = lane / 4 and t = lane % 4, a lane holds
//   of A: rows g, g + 8, g, g + 8 at columns 2t, 2t, 2t + 8, 2t + 8, each with the column after it;
//   of B: rows 2t and 2t + 8, each with the row after it, of column g;
//   of the result: rows g, g, g + 8, g + 8 at columns 2t, 2t + 1, 2t, 2t + 1.
//
// Shared memory is that of the launch, and is named by addresses of 32 bits. The emulator's begins
// at zero, and it says who leaves it.

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

// The thread's number, read anew: what follows from it takes no registers in between.
DEVICE u32 this_thread() {
#ifdef __EMULATED_CUDA__
    return threadIdx.x;
#else
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
#endif
}

// The same of its number in the warp.
DEVICE u32 this_lane() {
#ifdef __EMULATED_CUDA__
    return threadIdx.x % 32;
#else
    u32 lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
#endif
}

#ifdef __EMULATED_CUDA__
// What lanes show each other: six words, of which each has the last two it showed. A lane that
// shows the next ones has met all others after they read those before the last.
static thread_local u32 emulated_shown[2][1024][6];
static thread_local u32 emulated_turn[1024];
DEVICE const u32 (*show(const u32 *words, int n))[6] {
    const u32 me = emulated_thread(), turn = emulated_turn[me]++ % 2;
    for (int i = 0; i < n; i++) emulated_shown[turn][me][i] = words[i];
    __syncwarp();
    return emulated_shown[turn] + me / 32 * 32;
}
template <class T> DEVICE float half_of(u32 both, int which) {
    T half;
    half.bits = (u16)(both >> (16 * which));
    return widen(half);
}
template <class T> DEVICE void mma(float *c, const u32 *a, u32 b0, u32 b1, T) {
    const u32 mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    const u32(*all)[6] = show(mine, 6);
    const int lane = (int)(emulated_thread() % 32), g = lane / 4, t = lane % 4;
    float x[2][16], y[2][16]; // rows g and g + 8; columns 2t and 2t + 1
    for (int k = 0; k < 16; k++)
        for (int i = 0; i < 2; i++) {
            x[i][k] = half_of<T>(all[4 * g + k % 8 / 2][i + k / 8 * 2], k % 2);
            y[i][k] = half_of<T>(all[4 * (2 * t + i) + k % 8 / 2][4 + k / 8], k % 2);
        }
    for (int e = 0; e < 4; e++)
        for (int k = 0; k < 16; k++) c[e] += x[e / 2][k] * y[e % 2][k];
}
#else
DEVICE void mma(float *c, const u32 *a, u32 b0, u32 b1, bf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
        "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma(float *c, const u32 *a, u32 b0, u32 b1, f16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
        "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

#ifdef __EMULATED_CUDA__
DEVICE u32 shared_begin() { return 0; }
// Bytes of shared memory from an address on, a multiple of 16.
DEVICE char *shared_at(u32 at, u32 bytes) {
    if (at % 16 != 0 || at + (u64)bytes > emulated_block->shared_bytes)
        emulated_block->fail("leaves shared memory, or is misaligned in it: address, of", at,
                             emulated_block->shared_bytes);
    return emulated_block->shared + at;
}
DEVICE void emulated_matrices(u32 *r, u32 at, bool is_transposed) {
    shared_at(at, 16);
    const u32(*all)[6] = show(&at, 1);
    const int lane = (int)(emulated_thread() % 32), g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++)
        for (int e = 0; e < 2; e++) {
            const int row = is_transposed ? 2 * t + e : g, column = is_transposed ? g : 2 * t + e;
            u16 half;
            memcpy(&half, emulated_block->shared + all[8 * i + row][0] + 2 * column, 2);
            r[i] = e == 0 ? half : r[i] | (u32)half << 16;
        }
}
// Four matrices of 8 x 8 halves: lanes from 8 i on name the rows of the one that `r[i]` gets, a row
// with 16 bytes. A lane gets elements 2t and 2t + 1 of row g, or of column g of the transposed ones.
DEVICE void load_matrices(u32 *r, u32 at) { emulated_matrices(r, at, false); }
DEVICE void load_transposed(u32 *r, u32 at) { emulated_matrices(r, at, true); }
// Two pairs of numbers.
DEVICE void load_pairs(float *v, u32 at) { memcpy(v, shared_at(at, 16), 16); }
#else
extern __shared__ __align__(1024) char shared_bytes[];
DEVICE u32 shared_begin() { return (u32)__cvta_generic_to_shared(shared_bytes); }
DEVICE void load_matrices(u32 *r, u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}
DEVICE void load_transposed(u32 *r, u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}
DEVICE void load_pairs(float *v, u32 at) {
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                 : "r"(at));
}
#endif

#ifdef __EMULATED_CUDA__
// Copies of a thread that are on their way: they are made when they are waited for, and until then
// their target is full of NaN. So it shows who reads too early, and who still reads what is there.
struct EmulatedCopy {
    u32 to;
    const void *from;
};
struct EmulatedCopies {
    static constexpr int GROUPS = 8, MOST = 64;
    EmulatedCopy copies[GROUPS][MOST];
    int n[GROUPS];
    u64 first, last; // groups on their way, and the one that is open
    EmulatedDim block;
};
static thread_local EmulatedCopies emulated_copies[512];
DEVICE EmulatedCopies &emulated_mine() {
    EmulatedCopies &c = emulated_copies[emulated_thread() % 512];
    const EmulatedDim b = blockIdx;
    if (c.block.x != b.x || c.block.y != b.y || c.block.z != b.z) {
        int left = 0;
        for (int g = 0; g < c.GROUPS; g++) left += c.n[g];
        if (left > 0) emulated_block->fail("a block ended before its copies: copies, at", left, 0);
        c.block = b;
    }
    return c;
}
// 16 bytes to shared memory, or zeros: they are there for this thread when it has waited for their
// group, and for others after a barrier.
template <class T> DEVICE void copy_16(u32 to, const T *from, bool is_there, const In<T> &of) {
    if (is_there && (from < of.p || from + 16 / sizeof(T) > of.p + of.count || (u64)from % 16 != 0))
        emulated_block->fail("a copy leaves its operand, or is misaligned: element, of",
                             (u64)(from - of.p), of.count);
    memset(shared_at(to, 16), 0xff, 16);
    EmulatedCopies &c = emulated_mine();
    int &n = c.n[c.last % c.GROUPS];
    if (n == c.MOST) emulated_block->fail("more copies than the emulator has room for", n, 0);
    c.copies[c.last % c.GROUPS][n++] = {to, is_there ? from : 0};
}
// Copies since the last call are a group.
DEVICE void end_group() {
    EmulatedCopies &c = emulated_mine();
    c.last++;
    if (c.last - c.first == c.GROUPS) emulated_block->fail("more groups than the emulator has", 8, 0);
}
// Waits for all groups but the latest ones.
template <int LATEST> DEVICE void wait_for_groups() {
    EmulatedCopies &c = emulated_mine();
    for (; c.first + LATEST < c.last; c.first++) {
        int &n = c.n[c.first % c.GROUPS];
        for (int i = 0; i < n; i++) {
            const EmulatedCopy &copy = c.copies[c.first % c.GROUPS][i];
            if (copy.from) memcpy(shared_at(copy.to, 16), copy.from, 16);
            else memset(shared_at(copy.to, 16), 0, 16);
        }
        n = 0;
    }
}
#else
template <class T> DEVICE void copy_16(u32 to, const T *from, bool is_there, const In<T> &) {
    const u64 at = (u64)__cvta_generic_to_global(from);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(at),
                 "r"(is_there ? 16 : 0)
                 : "memory");
}
DEVICE void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LATEST> DEVICE void wait_for_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATEST) : "memory");
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
template <class T> DEVICE void set_eight(const Out<T> &y, i64 at, const Quad &q) {
#ifdef __EMULATED_CUDA__
    y.at(at + 7);
    if ((u64)&y.at(at) % 16 != 0)
        emulated_block->fail("misaligned address of eight elements, at", (u64)at, y.count);
#endif
    *(Quad *)&y.at(at) = q;
}
