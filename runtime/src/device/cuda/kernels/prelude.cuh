// Before every kernel: element types, operands, and sums over a block.
//
// A kernel has one parameter, `Args a`: operands `a.x`, results `a.y`, and numbers, of which each
// kernel says what they are. `T0`, `T1`, .. are the element types of its operands and `O0`, `O1`,
// .. of its results; they are macros, so that a kernel is compiled for the types it is used with.
// Everything is computed in f32 unless it says otherwise, and rounded once.

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef float f32;
typedef int i32;

#define DEVICE static __device__ __forceinline__

struct bf16 {
    u16 bits;
};
struct f16 {
    u16 bits;
};

struct Span {
    u64 at;
    u64 bytes;
};

// What changes from step to step: learning rate, and updates that were made before.
struct Now {
    double lr;
    i64 updates;
};

// `Args` of args.rs has the same fields in the same order.
struct Args {
    Span x[8];
    Span y[4];
    i64 n[64];
    double f[8];
    float table[128];
    Now now;
};

// The parameter of a launch that makes many calls at once, also that of args.rs: their parameters,
// which are in memory, the blocks of all up to each, and their number. They have one `now`.
struct Calls {
    Span args;
    Span ends;
    i64 n;
    Now now;
};

#ifdef __EMULATED_CUDA__
#define ENTRY(name, Parameter) EMULATED_KERNEL(name, Parameter)
#else
#define ENTRY(name, Parameter) extern "C" __global__ void name(const Parameter a)
#endif
#define KERNEL(name) ENTRY(name, Args)

DEVICE float widen(f32 x) { return x; }
DEVICE float widen(double x) { return (float)x; }
DEVICE float widen(i32 x) { return (float)x; }
DEVICE float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
DEVICE float widen(f16 x) {
#ifdef __EMULATED_CUDA__
    _Float16 half;
    memcpy(&half, &x.bits, 2);
    return (float)half;
#else
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
#endif
}

DEVICE void round_to(float v, f32 &to) { to = v; }
// To the nearest, ties to even; NaN stays NaN.
DEVICE void round_to(float v, bf16 &to) {
#if !defined(__EMULATED_CUDA__) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(v));
#else
    u32 bits = __float_as_uint(v);
    to.bits = v != v ? (u16)(bits >> 16 | 0x40) : (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
}
DEVICE void round_to(float v, f16 &to) {
#ifdef __EMULATED_CUDA__
    _Float16 half = (_Float16)v;
    memcpy(&to.bits, &half, 2);
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(v));
#endif
}

// Where an operand lies. On the emulator it knows its length, and says who leaves it.
template <class T> struct Part {
    T *p;
#ifdef __EMULATED_CUDA__
    u64 count;
    Part(Span s) {
        count = s.bytes / sizeof(T);
        p = (T *)emulated_block->span(s.at, s.bytes);
        if ((u64)p % alignof(T) != 0) emulated_block->fail("misaligned address, of bytes", s.at, s.bytes);
    }
    T &at(i64 i) const {
        if ((u64)i >= count) emulated_block->fail("out of bounds: element, of", (u64)i, count);
        return p[i];
    }
#else
    __device__ __forceinline__ Part(Span s) { p = (T *)s.at; }
    __device__ __forceinline__ T &at(i64 i) const { return p[i]; }
#endif
};

template <class T> struct In : Part<T> {
    __device__ __forceinline__ In(Span s) : Part<T>(s) {}
    __device__ __forceinline__ float operator[](i64 i) const { return widen(this->at(i)); }
    __device__ __forceinline__ T raw(i64 i) const { return this->at(i); }
};

template <class T> struct Out : Part<T> {
    __device__ __forceinline__ Out(Span s) : Part<T>(s) {}
    __device__ __forceinline__ float operator[](i64 i) const { return widen(this->at(i)); }
    __device__ __forceinline__ void set(i64 i, float v) const { round_to(v, this->at(i)); }
    __device__ __forceinline__ void raw(i64 i, T v) const { this->at(i) = v; }
};

// 16 bytes that are read and written at once.
struct alignas(16) Quad {
    u32 w[4];
};

// The bits of an element in a word, and back.
DEVICE void from_word(u32 w, bf16 &x) { x.bits = (u16)w; }
DEVICE void from_word(u32 w, f16 &x) { x.bits = (u16)w; }
DEVICE void from_word(u32 w, f32 &x) { x = __uint_as_float(w); }
DEVICE void from_word(u32 w, i32 &x) { x = (i32)w; }
DEVICE u32 to_word(bf16 x) { return x.bits; }
DEVICE u32 to_word(f16 x) { return x.bits; }
DEVICE u32 to_word(f32 x) { return __float_as_uint(x); }
DEVICE u32 to_word(i32 x) { return (u32)x; }

// The bits of one or two elements that make a word.
template <class T> DEVICE u32 word_of(const float *v) {
    u32 w = 0;
    for (int k = 0; k < 4 / (int)sizeof(T); k++) {
        T t;
        round_to(v[k], t);
        w |= to_word(t) << (16 * k);
    }
    return w;
}
#if !defined(__EMULATED_CUDA__) && __CUDA_ARCH__ >= 800
// Both at once.
template <> __device__ __forceinline__ u32 word_of<bf16>(const float *v) {
    u32 w;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(v[1]), "f"(v[0]));
    return w;
}
template <> __device__ __forceinline__ u32 word_of<f16>(const float *v) {
    u32 w;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(v[1]), "f"(v[0]));
    return w;
}
#endif

// Eight elements as they are stored, in few registers.
template <class T> struct Eight {
    Quad q[sizeof(T) / 2];
};

// Eight elements from `i` on, a multiple of 8, of an operand or result that begins at a multiple of
// 16 bytes. Memory is fast where a thread has several elements under way.
template <class T> DEVICE Eight<T> take8(const In<T> &x, i64 i) {
#ifdef __EMULATED_CUDA__
    x.at(i + 7);
    if ((u64)&x.at(i) % 16 != 0)
        emulated_block->fail("misaligned address of eight elements, of", (u64)i, x.count);
#endif
    return *(const Eight<T> *)&x.at(i);
}
template <class T> DEVICE void widen8(const Eight<T> &from, float *v) {
    const int in_word = 4 / (int)sizeof(T); // elements
#pragma unroll
    for (int k = 0; k < 8; k++) {
        T t;
        from_word(from.q[k / in_word / 4].w[k / in_word % 4] >> (16 * (k % in_word)), t);
        v[k] = widen(t);
    }
}
template <class T> DEVICE void load8(const In<T> &x, i64 i, float *v) { widen8(take8(x, i), v); }
// Eight numbers as they are stored.
template <class T> DEVICE Eight<T> stored8(const float *v) {
    const int in_word = 4 / (int)sizeof(T); // elements
    Eight<T> to;
#pragma unroll
    for (int w = 0; w < 8 / in_word; w++) to.q[w / 4].w[w % 4] = word_of<T>(v + in_word * w);
    return to;
}
template <class T> DEVICE void put8(const Out<T> &y, i64 i, const Eight<T> &v) {
#ifdef __EMULATED_CUDA__
    y.at(i + 7);
    if ((u64)&y.at(i) % 16 != 0)
        emulated_block->fail("misaligned address of eight elements, of", (u64)i, y.count);
#endif
    *(Eight<T> *)&y.at(i) = v;
}
template <class T> DEVICE void store8(const Out<T> &y, i64 i, const float *v) {
    put8(y, i, stored8<T>(v));
}
// Whether elements are taken by eights: all are aligned and their number is a multiple of 8.
#define WIDE (a.n[63] != 0)

// A thread takes two eights at a time, so far apart as there are threads: one alone would leave the
// memory waiting. `first` begins at the thread's first eight, of `n`; then `at` is one of the two.
#define AT_ONCE 2
#define FOR_PAIRS_OF(block, blocks, first, n)                                                    \
    for (i64 first = (i64)(block) * blockDim.x + threadIdx.x, apart = (i64)(blocks) * blockDim.x; \
         first < (n); first += AT_ONCE * apart)
#define FOR_PAIRS(first, n) FOR_PAIRS_OF(blockIdx.x, gridDim.x, first, n)
#define FOR_BOTH(k, at, first, n)                                                                \
    _Pragma("unroll") for (int k = 0; k < AT_ONCE; k++)                                          \
        if (const i64 at = first + k * apart; at < (n))

// Quotient and rest, in half the bits where they are enough: divisions are slow.
DEVICE i64 divide(i64 n, i64 by, i64 &rest) {
    if ((((u64)n | (u64)by) >> 32) == 0) {
        const u32 q = (u32)n / (u32)by;
        rest = (u32)n - q * (u32)by;
        return q;
    }
    rest = n % by;
    return n / by;
}

#define FOR_EACH_OF(block, blocks, i, n)                                                         \
    for (i64 i = (i64)(block) * blockDim.x + threadIdx.x; i < (n); i += (i64)(blocks) * blockDim.x)
#define FOR_EACH(i, n) FOR_EACH_OF(blockIdx.x, gridDim.x, i, n)

// A kernel `name`, and `name_all` for many calls of it in one launch: every call has the blocks
// that it would have alone, so that both give the same bits. The body has the call's parameter `a`
// (which may lie in memory, so what is needed again and again is copied first), `now`, and in `grid`
// its block and how many blocks the call has; it goes over its elements by the macros below.
struct Grid {
    u32 block, blocks;
};
#define FOR_MINE(i, n) FOR_EACH_OF(grid.block, grid.blocks, i, n)
#define FOR_MY_PAIRS(first, n) FOR_PAIRS_OF(grid.block, grid.blocks, first, n)
#define JOINED_KERNEL(name)                                                                      \
    DEVICE void name##_body(const Args &a, const Now &now, const Grid grid);                     \
    ENTRY(name, Args) {                                                                          \
        const Grid grid = {blockIdx.x, gridDim.x};                                               \
        name##_body(a, a.now, grid);                                                             \
    }                                                                                            \
    ENTRY(name##_all, Calls) {                                                                   \
        Grid grid;                                                                               \
        const Args &call = call_of(a, grid);                                                     \
        name##_body(call, a.now, grid);                                                          \
    }                                                                                            \
    DEVICE void name##_body(const Args &a, const Now &now, const Grid grid)

// The call that this block is part of: the first one whose blocks end behind it.
DEVICE const Args &call_of(const Calls &all, Grid &grid) {
    const In<Args> args(all.args);
    const In<u32> ends(all.ends);
    i64 low = 0, high = all.n - 1;
    while (low < high) {
        const i64 middle = (low + high) / 2;
        if (ends.at(middle) <= blockIdx.x) low = middle + 1;
        else high = middle;
    }
    const u32 begin = low > 0 ? ends.at(low - 1) : 0;
    grid.block = blockIdx.x - begin;
    grid.blocks = ends.at(low) - begin;
    return args.at(low);
}

#define INFINITE __uint_as_float(0x7f800000u)
#define NOT_A_NUMBER __uint_as_float(0x7fc00000u)

// 1 / x by the special function unit, within two units in the last place, of numbers and results
// that are not subnormal: a division that rounds right is several times as many instructions.
DEVICE float reciprocal(float x) {
#ifdef __EMULATED_CUDA__
    return 1.0f / x;
#else
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}
// 2^x by the same unit, within two units in the last place; 0 where that would be subnormal.
DEVICE float power_of_two(float x) {
#ifdef __EMULATED_CUDA__
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}
#define LOG2_E 1.44269504f

// a + b, which is never made one with the product that a is: what is computed does not depend on what
// stands around it.
DEVICE float plus(float a, float b) {
#ifdef __EMULATED_CUDA__
    return a + b;
#else
    return __fadd_rn(a, b);
#endif
}

// The number that is read where `v` is written as this type.
template <class T> DEVICE float as_stored(float v) {
    T t;
    round_to(v, t);
    return widen(t);
}

DEVICE float larger(float a, float b) { return (a >= b || a != a) ? a : b; }

DEVICE float warp_sum(float v) {
    for (int mask = 16; mask > 0; mask /= 2) v += __shfl_xor_sync(0xffffffffu, v, mask);
    return v;
}
DEVICE float warp_max(float v) {
    for (int mask = 16; mask > 0; mask /= 2) v = larger(v, __shfl_xor_sync(0xffffffffu, v, mask));
    return v;
}

// The sum over a block of at most 1024 threads, a multiple of 32, for all of them; in an order
// that the number of threads alone decides.
template <class V> DEVICE V block_sum(V v) {
    __shared__ V sums[32];
    for (int mask = 16; mask > 0; mask /= 2) v += __shfl_xor_sync(0xffffffffu, v, mask);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0;
    for (u32 i = 0; i < blockDim.x / 32; i++) v += sums[i];
    __syncthreads();
    return v;
}
DEVICE float block_max(float v) {
    __shared__ float most[32];
    v = warp_max(v);
    if (threadIdx.x % 32 == 0) most[threadIdx.x / 32] = v;
    __syncthreads();
    v = most[0];
    for (u32 i = 1; i < blockDim.x / 32; i++) v = larger(v, most[i]);
    __syncthreads();
    return v;
}

// The sums of 32 x 8 threads over their eight warps, of eight columns each: the block's 256 columns
// of a row of `y` of `width` elements from `first` on.
template <class V> DEVICE void add_warps(V (*sums)[8][32], const V *v, const Out<double> &y,
                                         i64 first, i64 width) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 8; k++) sums[warp][k][lane] = v[k];
    __syncthreads();
    // Now a warp has every eighth column, so that nothing lies in the same bank.
    double sum = 0;
    for (int i = 0; i < 8; i++) sum += sums[i][warp][lane];
    const i64 c = ((i64)blockIdx.x * 32 + lane) * 8 + warp;
    if (c < width) y.raw(first + c, sum);
}

// Where a stored element of a sequence stands: as it is stored, or, with chunks of `chunk`
// elements from both ends, in zigzag order for so many ranks.
DEVICE i64 position(i64 stored, i64 chunk, i64 ranks) {
    if (chunk == 0) return stored;
    i64 i = stored / chunk, inside = stored % chunk;
    return (i % 2 == 0 ? i / 2 : 2 * ranks - 1 - i / 2) * chunk + inside;
}

// All four words of Philox4x32-10.
DEVICE void philox_words(u64 block, u32 tweak0, u32 tweak1, u32 key0, u32 key1, u32 *c) {
    c[0] = (u32)block;
    c[1] = (u32)(block >> 32);
    c[2] = tweak0;
    c[3] = tweak1;
    for (int round = 0; round < 10; round++) {
        if (round > 0) {
            key0 += 0x9E3779B9u;
            key1 += 0xBB67AE85u;
        }
        u32 lo0 = 0xD2511F53u * c[0], hi0 = __umulhi(0xD2511F53u, c[0]);
        u32 lo1 = 0xCD9E8D57u * c[2], hi1 = __umulhi(0xCD9E8D57u, c[2]);
        c[0] = hi1 ^ c[1] ^ key0;
        c[1] = lo1;
        c[2] = hi0 ^ c[3] ^ key1;
        c[3] = lo0;
    }
}
// Word 0 to 3 of them.
DEVICE u32 philox(u64 block, u32 tweak0, u32 tweak1, u32 key0, u32 key1, int word) {
    u32 c[4];
    philox_words(block, tweak0, tweak1, key0, key1, c);
    return c[word];
}
// A word as a number in [0, 1).
DEVICE float unit(u32 word) { return (float)(word >> 8) * (1.0f / 16777216.0f); }
// The number in [0, 1) of an element of a tensor's stream, whose key is four words.
DEVICE float uniform(u64 element, const i64 *key) {
    u32 word = philox(element / 4, (u32)key[2], (u32)key[3], (u32)key[0], (u32)key[1],
                      (int)(element % 4));
    return unit(word);
}
// Those of four elements, the first of which is a multiple of 4: words of one block.
DEVICE void uniform4(u64 first, const i64 *key, float *u) {
    u32 words[4];
    philox_words(first / 4, (u32)key[2], (u32)key[3], (u32)key[0], (u32)key[1], words);
    for (int k = 0; k < 4; k++) u[k] = unit(words[k]);
}
