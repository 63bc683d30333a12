// What NVRTC's language has beyond C++, for a host compiler: the emulator's compiler puts this
// before every source. Threads of a block are fibers of one host thread; they are switched at
// barriers and in shuffles, and nowhere else.
#define __EMULATED_CUDA__ 1
#include <math.h>
#include <string.h>

struct EmulatedDim {
    unsigned x, y, z;
};

// Shared with the driver: `Block` in block.rs has the same fields in the same order.
struct EmulatedBlock {
    EmulatedDim thread, block, block_dim, grid_dim;
    unsigned long long *slots;
    void (*sync)();
    void (*sync_warp)();
    void (*fail)(const char *what, unsigned long long a, unsigned long long b);
    unsigned long long (*span)(unsigned long long at, unsigned long long bytes);
    char *shared; // that a launch asked for, at a multiple of 1024
    unsigned long long shared_bytes;
};

static thread_local EmulatedBlock *emulated_block;
extern "C" void emulated_attach(EmulatedBlock *block) { emulated_block = block; }

#define threadIdx (emulated_block->thread)
#define blockIdx (emulated_block->block)
#define blockDim (emulated_block->block_dim)
#define gridDim (emulated_block->grid_dim)

#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__ __restrict
// The blocks that a host thread runs follow each other, and so may share the memory.
#define __shared__ static thread_local

// A kernel whose only parameter is `const Args a`.
#define EMULATED_KERNEL(name, Args)                                                              \
    static void name##_body(const Args &a);                                                      \
    extern "C" const unsigned long long name##_bytes = sizeof(Args);                             \
    extern "C" void name(void *parameter) { name##_body(*(const Args *)parameter); }             \
    static void name##_body(const Args &a)

inline void __syncthreads() { emulated_block->sync(); }
inline void __syncwarp(unsigned = 0xffffffffu) { emulated_block->sync_warp(); }

inline unsigned emulated_thread() {
    return (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
}

// All threads of a warp that have not ended take part, as with a full mask.
template <class T> inline T emulated_exchange(T value, unsigned from_lane) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    unsigned me = emulated_thread();
    memcpy(&emulated_block->slots[me], &value, sizeof(T));
    __syncwarp();
    T found;
    memcpy(&found, &emulated_block->slots[me / 32 * 32 + from_lane], sizeof(T));
    __syncwarp();
    return found;
}
template <class T> inline T __shfl_sync(unsigned, T value, int lane) {
    return emulated_exchange(value, (unsigned)lane & 31);
}
template <class T> inline T __shfl_xor_sync(unsigned, T value, int mask) {
    return emulated_exchange(value, (emulated_thread() ^ (unsigned)mask) & 31);
}
template <class T> inline T __shfl_down_sync(unsigned, T value, unsigned by) {
    unsigned lane = emulated_thread() & 31;
    return emulated_exchange(value, lane + by < 32 ? lane + by : lane);
}

inline int __any_sync(unsigned, int is_so) {
    for (int mask = 16; mask > 0; mask /= 2) is_so |= __shfl_xor_sync(0xffffffffu, is_so, mask);
    return is_so;
}

template <class T> inline T atomicAdd(T *at, T value) {
    T old = *at;
    *at = old + value;
    return old;
}

inline unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
    return (unsigned)(((unsigned long long)a * b) >> 32);
}
