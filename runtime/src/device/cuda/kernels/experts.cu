// Mixtures of experts: choices of tokens, rows to the slots of their experts and back, the gradients
// of these, biases of experts, and a gated activation within bounds.
//
// An expert has `capacity` slots for each sample. A choice that is taken has the slot
// `expert * capacity + place`, one that is dropped `-(expert + 1)`. A rank has the slots of its own
// experts: so many from a first one on. Rows of slots are y[expert][sample][place], those of tokens
// x[sample][token], and choices c[sample][token][choice].
//
// All operands that may be halves have type T0, but for a router's bias, which has T1.

// Memory that the launch gives each block.
#ifdef __EMULATED_CUDA__
DEVICE char *block_memory(u64 bytes) {
    if (bytes > emulated_block->shared_bytes)
        emulated_block->fail("more shared memory than the block has: bytes, of", bytes,
                             emulated_block->shared_bytes);
    return emulated_block->shared;
}
#else
extern __shared__ __align__(16) char block_bytes[];
DEVICE char *block_memory(u64) { return block_bytes; }
#endif

// Over `lanes` neighbours of a warp, a power of two. All lanes of the warp take part.
template <class V> DEVICE V lanes_sum(V v, int lanes) {
    for (int mask = lanes / 2; mask > 0; mask /= 2) v += __shfl_xor_sync(0xffffffffu, v, mask);
    return v;
}
// NaN is no maximum, as for the CPU's routes.
DEVICE float lanes_max(float v, int lanes) {
    for (int mask = lanes / 2; mask > 0; mask /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, v, mask);
        v = other > v ? other : v;
    }
    return v;
}

// In what terms are added up: halves lose nothing in f32 that their rounding would show.
template <class T> struct Sum {
    typedef float type;
};
template <> struct Sum<f32> {
    typedef double type;
};

// The bits of a number in its place among all, by IEEE's total order, above zero.
DEVICE u64 ordered(double x) {
    u64 bits;
    memcpy(&bits, &x, 8);
    const u64 sign = 1ull << 63;
    bits = bits & sign ? ~bits : bits | sign;
    return bits > 0 ? bits : 1;
}
DEVICE double number(u64 key) {
    const u64 sign = 1ull << 63, bits = key & sign ? key & ~sign : ~key;
    double x;
    memcpy(&x, &bits, 8);
    return x;
}

// Where the largest of `n` keys is, of equal ones the first: for all of the row's lanes.
DEVICE int largest_of(const u64 *keys, int n, int lane, int lanes) {
    u64 top = 0;
    int at = 0x7fffffff;
    for (int i = lane; i < n; i += lanes) {
        const u64 key = keys[i];
        if (key > top) {
            top = key;
            at = i;
        }
    }
    for (int mask = lanes / 2; mask > 0; mask /= 2) {
        const u64 other = __shfl_xor_sync(0xffffffffu, top, mask);
        const int there = __shfl_xor_sync(0xffffffffu, at, mask);
        if (other > top || (other == top && there < at)) {
            top = other;
            at = there;
        }
    }
    return at;
}

// Figures that choices are made by are f64, as the CPU's, so that the choices are the same.
DEVICE double weight(float logit, float most) {
    const double x = (double)logit - (double)most;
    return exp(x < -708.0 ? -708.0 : x);
}
DEVICE double score(float logit, float most, bool is_sigmoid) {
    return is_sigmoid ? 1.0 / (1.0 + exp(-(double)logit)) : weight(logit, most);
}

// The sum of a group's `best` largest keys of `each`, the largest first, by one lane. The lanes of a
// row begin at other keys, which lie in other banks.
DEVICE double sum_of_best(const u64 *keys, int each, int best, int begin) {
    double sum = 0;
    u64 last = ~0ull;
    int last_at = -1;
    for (int b = 0; b < best; b++) {
        u64 top = 0;
        int top_at = each, i = begin;
        for (int j = 0; j < each; j++) {
            const u64 key = keys[i];
            const bool is_left = key < last || (key == last && i > last_at);
            if (is_left && (key > top || (key == top && i < top_at))) {
                top = key;
                top_at = i;
            }
            i = i + 1 < each ? i + 1 : 0;
        }
        sum += number(top);
        last = top;
        last_at = top_at;
    }
    return sum;
}

// Logits, perhaps a bias of experts, to gates y[0] and to the expert of each choice, in a list y[1]
// of each sample: all first choices in order of the tokens, then all second ones, and so on. A row
// has some lanes of a warp, which keep its keys in shared memory; a key that is out is zero.
// n = rows, experts, choices, lanes, tokens of a sample, length of a list, whether scores are
// sigmoids, whether gates are normalized, whether logits are keys, whether there is a bias, groups,
// groups that are kept, scores of a group that count, words of shared memory of a row.
KERNEL(route) {
    In<T0> logits(a.x[0]);
    Out<f32> gates(a.y[0]);
    Out<i32> list(a.y[1]);
    const int experts = (int)a.n[1], top_k = (int)a.n[2], lanes = (int)a.n[3];
    const bool is_sigmoid = a.n[6] != 0, normalizes = a.n[7] != 0, by_logits = a.n[8] != 0;
    const int groups = (int)a.n[10];
    const int at_once = (int)blockDim.x / lanes, own = (int)threadIdx.x / lanes;
    const int lane = (int)threadIdx.x % lanes;
    u64 *const keys = (u64 *)block_memory(8 * a.n[13] * at_once) + own * a.n[13];
    u64 *const of_groups = keys + experts;
    i32 *const chosen = (i32 *)(of_groups + groups);
    for (i64 first = (i64)blockIdx.x * at_once; first < a.n[0]; first += (i64)gridDim.x * at_once) {
        // What is past the last row goes along, and is not written.
        const bool is_row = first + own < a.n[0];
        const i64 row = is_row ? first + own : a.n[0] - 1, at = row * experts;
        float most = -INFINITE;
        double all = 0;
        if (!is_sigmoid) {
            for (int e = lane; e < experts; e += lanes) {
                const float v = logits[at + e];
                most = v > most ? v : most;
            }
            most = lanes_max(most, lanes);
            if (!normalizes || !by_logits) {
                for (int e = lane; e < experts; e += lanes) all += weight(logits[at + e], most);
                all = lanes_sum(all, lanes);
            }
        }
        for (int e = lane; e < experts; e += lanes) {
            const float v = logits[at + e];
            double key = v;
            if (!by_logits) {
                key = score(v, most, is_sigmoid);
                if (!is_sigmoid) key /= all;
            }
            if (a.n[9]) {
                In<T1> bias(a.x[1]);
                key += (double)bias[e];
            }
            keys[e] = ordered(key);
        }
        __syncwarp();
        if (groups > 0) {
            const int each = experts / groups;
            for (int g = lane; g < groups; g += lanes) {
                const double sum = sum_of_best(keys + g * each, each, (int)a.n[12], g % each);
                of_groups[g] = ordered(sum);
            }
            __syncwarp();
            for (int r = 0; r < (int)a.n[11]; r++) {
                const int g = largest_of(of_groups, groups, lane, lanes);
                if (lane == 0) of_groups[g] = 0;
                __syncwarp();
            }
            // Those that were taken are kept.
            for (int g = 0; g < groups; g++)
                if (of_groups[g] != 0)
                    for (int j = lane; j < each; j += lanes) keys[g * each + j] = 0;
            __syncwarp();
        }
        for (int i = 0; i < top_k; i++) {
            const int e = largest_of(keys, experts, lane, lanes);
            if (lane == 0) {
                keys[e] = 0;
                chosen[i] = e;
            }
            __syncwarp();
        }
        double sum = is_sigmoid ? 1.0 : all;
        if (normalizes) {
            sum = 0;
            for (int i = lane; i < top_k; i += lanes)
                sum += score(logits[at + chosen[i]], most, is_sigmoid);
            sum = lanes_sum(sum, lanes);
            if (is_sigmoid) sum += 1e-20;
        }
        if (is_row) {
            i64 token;
            const i64 sample = divide(row, a.n[4], token);
            for (int i = lane; i < top_k; i += lanes) {
                const int e = chosen[i];
                gates.set(row * top_k + i, (float)(score(logits[at + e], most, is_sigmoid) / sum));
                list.raw(sample * a.n[5] + i * a.n[4] + token, e);
            }
        }
        __syncwarp();
    }
}

// Four entries of a list from `i` on, a multiple of 4.
DEVICE Quad four_of(const In<i32> &list, i64 i) {
    list.at(i + 3);
    return *(const Quad *)&list.at(i);
}

// The lists of route to slots: a block for an expert of a sample, whose eight warps have a part of
// the list each. They count the expert's entries, then number them. n = entries of a list, length of
// a list, entries of a warp, tokens, choices, capacity, samples.
KERNEL(route_places) {
    In<i32> list(a.x[0]);
    Out<i32> slots(a.y[0]);
    __shared__ i32 counts[8];
    const i32 expert = (i32)blockIdx.x, n = (i32)a.n[0], of_warp = (i32)a.n[2];
    const i32 tokens = (i32)a.n[3], top_k = (i32)a.n[4], capacity = (i32)a.n[5];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i32 first = warp * of_warp, last = first + of_warp < n ? first + of_warp : n;
    for (i64 sample = blockIdx.y; sample < a.n[6]; sample += gridDim.y) {
        const i64 base = sample * a.n[1];
        i32 count = 0;
#pragma unroll 4
        for (i32 i = first + 4 * lane; i < last; i += 128) {
            const Quad four = four_of(list, base + i);
            for (int k = 0; k < 4; k++) count += i + k < last && (i32)four.w[k] == expert;
        }
        count = lanes_sum(count, 32);
        if (lane == 0) counts[warp] = count;
        __syncthreads();
        i32 before = 0;
        for (int w = 0; w < warp; w++) before += counts[w];
        for (i32 i0 = first; i0 < last; i0 += 128) {
            const i32 i = i0 + 4 * lane;
            Quad four = {{~0u, ~0u, ~0u, ~0u}};
            if (i < last) four = four_of(list, base + i);
            i32 own = 0;
            for (int k = 0; k < 4; k++) own += i + k < last && (i32)four.w[k] == expert;
            i32 up_to = own; // with those of lower lanes
            for (int by = 1; by < 32; by *= 2) {
                const i32 lower = __shfl_sync(0xffffffffu, up_to, lane - by & 31);
                if (lane >= by) up_to += lower;
            }
            i32 place = before + up_to - own;
            before += __shfl_sync(0xffffffffu, up_to, 31);
            for (int k = 0; k < 4; k++) {
                if (i + k >= last || (i32)four.w[k] != expert) continue;
                const i32 choice = (i + k) / tokens, token = i + k - choice * tokens;
                slots.raw((sample * tokens + token) * top_k + choice,
                          place < capacity ? expert * capacity + place : -(expert + 1));
                place++;
            }
        }
        // The counts are read before the next sample's are written.
        __syncthreads();
    }
}

// The expert of a choice, taken or dropped.
DEVICE u32 expert_of(i32 slot, u32 capacity) {
    return slot >= 0 ? (u32)slot / capacity : (u32)(-(slot + 1));
}

// Logits, slots and gradients of gates to the logits' gradients; a row has some lanes of a warp.
// n = rows, experts, choices, lanes, capacity, whether scores are sigmoids, whether gates are
// normalized. Of choices' own weights the largest is scaled to 1, so that none of all is lost.
KERNEL(route_grad) {
    In<T0> logits(a.x[0]);
    In<i32> slots(a.x[1]);
    In<f32> dgates(a.x[2]);
    Out<T0> dlogits(a.y[0]);
    const u32 experts = (u32)a.n[1], capacity = (u32)a.n[4];
    const int top_k = (int)a.n[2], lanes = (int)a.n[3];
    const bool is_sigmoid = a.n[5] != 0, normalizes = a.n[6] != 0;
    const int at_once = (int)blockDim.x / lanes, own = (int)threadIdx.x / lanes;
    const int lane = (int)threadIdx.x % lanes;
    for (i64 first = (i64)blockIdx.x * at_once; first < a.n[0]; first += (i64)gridDim.x * at_once) {
        const bool is_row = first + own < a.n[0];
        const i64 row = is_row ? first + own : a.n[0] - 1, at = row * experts;
        float most = -INFINITE, sum = 0;
        if (!is_sigmoid) {
            if (normalizes) {
                for (int i = lane; i < top_k; i += lanes) {
                    const u32 e = expert_of(slots.raw(row * top_k + i), capacity);
                    const float v = e < experts ? logits[at + e] : -INFINITE;
                    most = v > most ? v : most;
                }
            } else {
                for (u32 e = lane; e < experts; e += lanes) {
                    const float v = logits[at + e];
                    most = v > most ? v : most;
                }
            }
            most = lanes_max(most, lanes);
            if (!normalizes)
                for (u32 e = lane; e < experts; e += lanes) sum += expf(logits[at + e] - most);
        }
        // The mean of the gradients, weighted by the gates.
        float mean = 0;
        for (int i = lane; i < top_k; i += lanes) {
            const u32 e = expert_of(slots.raw(row * top_k + i), capacity);
            if (e >= experts) continue;
            const float v = logits[at + e];
            const float w = is_sigmoid ? reciprocal(1.0f + expf(-v)) : expf(v - most);
            if (normalizes) sum += w;
            mean += w * dgates[row * top_k + i];
        }
        sum = lanes_sum(sum, lanes);
        mean = lanes_sum(mean, lanes);
        if (is_sigmoid && !normalizes) {
            sum = 1;
            mean = 0;
        } else {
            if (is_sigmoid) sum += 1e-20f;
            mean /= sum;
        }
        const bool has_rest = !is_sigmoid && !normalizes;
        if (is_row)
            for (u32 e = lane; e < experts; e += lanes)
                dlogits.set(at + e, has_rest ? -expf(logits[at + e] - most) / sum * mean : 0.0f);
        // Then those that were chosen, perhaps by other lanes.
        __syncwarp();
        if (!is_row) continue;
        for (int i = lane; i < top_k; i += lanes) {
            const u32 e = expert_of(slots.raw(row * top_k + i), capacity);
            if (e >= experts) continue;
            const float v = logits[at + e], d = dgates[row * top_k + i] - mean;
            if (is_sigmoid) {
                const float s = reciprocal(1.0f + expf(-v)), rest = reciprocal(1.0f + expf(v));
                dlogits.set(at + e, s / sum * rest * d);
            } else {
                dlogits.set(at + e, expf(v - most) / sum * d);
            }
        }
    }
}

// Slots to the choice of each slot, its number plus one; slots without one stay zero. n = choices of
// a sample that are none of padding, choices of a sample, samples, first slot, slots.
KERNEL(slot_owners) {
    In<i32> slots(a.x[0]);
    Out<i32> owners(a.y[0]);
    for (i64 sample = blockIdx.y; sample < a.n[2]; sample += gridDim.y)
        FOR_EACH(i, a.n[0]) {
            const i64 choice = sample * a.n[1] + i, slot = slots.raw(choice) - a.n[3];
            if (slot >= 0 && slot < a.n[4]) owners.raw(sample * a.n[4] + slot, (i32)choice + 1);
        }
}

// Rows of which some threads of a block have one each, a power of two: from `first` on, of `n`.
#define FOR_ROWS(row, n, of_row)                                                                 \
    for (i64 row = (i64)blockIdx.x * (blockDim.x / (of_row)) + threadIdx.x / (of_row); row < (n); \
         row += (i64)gridDim.x * (blockDim.x / (of_row)))

// Rows of tokens, the choice of each slot, perhaps gates, to rows of slots: a result is written
// once, with zeros where a slot is empty. n = slots of an expert, samples, samples that are no
// padding, experts, width, choices, threads of a row, whether there are gates.
KERNEL(dispatch) {
    In<T0> x(a.x[0]);
    In<i32> owners(a.x[1]);
    Out<T0> y(a.y[0]);
    const i64 capacity = a.n[0], samples = a.n[1], width = a.n[4];
    const u32 top_k = (u32)a.n[5], of_row = (u32)a.n[6], t = threadIdx.x % of_row;
    for (i64 expert = blockIdx.z; expert < a.n[3]; expert += gridDim.z)
        for (i64 sample = blockIdx.y; sample < a.n[2]; sample += gridDim.y)
            FOR_ROWS(place, capacity, of_row) {
                const i32 owner = owners.raw((sample * a.n[3] + expert) * capacity + place);
                const i64 from = (i64)((u32)(owner > 0 ? owner - 1 : 0) / top_k) * width;
                const i64 to = ((expert * samples + sample) * capacity + place) * width;
                float gate = 1.0f;
                if (owner > 0 && a.n[7]) {
                    In<f32> gates(a.x[2]);
                    gate = gates[owner - 1];
                }
                if (WIDE) {
                    float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll 2
                    for (i64 c = 8 * t; c < width; c += 8 * of_row) {
                        if (owner > 0) {
                            load8(x, from + c, v);
                            for (int k = 0; k < 8; k++) v[k] *= gate;
                        }
                        store8(y, to + c, v);
                    }
                } else {
                    for (i64 c = t; c < width; c += of_row)
                        y.set(to + c, owner > 0 ? gate * x[from + c] : 0.0f);
                }
            }
}

// The row of a slot of a sample, or -1 where this rank has none.
struct Places {
    i64 first, slots, capacity, samples;
    __device__ __forceinline__ i64 row(i32 slot, i64 sample) const {
        const i64 own = slot - first;
        if (own < 0 || own >= slots) return -1;
        const i64 expert = (u32)own / (u32)capacity;
        return own + (expert * (samples - 1) + sample) * capacity;
    }
};

// E elements of a row from `at` on.
template <int E, class T> struct Elements;
template <class T> struct Elements<8, T> {
    Eight<T> bits;
    __device__ __forceinline__ void take(const In<T> &x, i64 at) { bits = take8(x, at); }
    __device__ __forceinline__ void widen_to(float *v) const { widen8(bits, v); }
    static __device__ __forceinline__ void put(const Out<T> &y, i64 at, const float *v) {
        store8(y, at, v);
    }
};
template <class T> struct Elements<1, T> {
    float value;
    __device__ __forceinline__ void take(const In<T> &x, i64 at) { value = x[at]; }
    __device__ __forceinline__ void widen_to(float *v) const { v[0] = value; }
    static __device__ __forceinline__ void put(const Out<T> &y, i64 at, const float *v) {
        y.set(at, v[0]);
    }
};

// Choices of which rows are on their way at a time.
#define CHOICES 4

template <int E> DEVICE void combine_row(const Args &a, const Places &places, i64 sample, i64 token) {
    typedef typename Sum<T0>::type Term;
    In<T0> y(a.x[0]);
    In<i32> slots(a.x[1]);
    Out<T0> out(a.y[0]);
    const i64 width = a.n[7], row = sample * a.n[1] + token;
    const int top_k = (int)a.n[8], of_row = (int)a.n[9], t = (int)threadIdx.x % of_row;
    for (i64 c = E * t; c < width; c += E * of_row) {
        Term sum[E];
        for (int e = 0; e < E; e++) sum[e] = 0;
        for (int i0 = 0; i0 < top_k; i0 += CHOICES) {
            Elements<E, T0> from[CHOICES];
            float gate[CHOICES];
            bool is_here[CHOICES];
#pragma unroll
            for (int j = 0; j < CHOICES; j++) {
                is_here[j] = false;
                if (i0 + j >= top_k) continue;
                const i64 choice = row * top_k + i0 + j, at = places.row(slots.raw(choice), sample);
                if (at < 0) continue;
                is_here[j] = true;
                from[j].take(y, at * width + c);
                gate[j] = 1.0f;
                if (a.n[10]) {
                    In<f32> gates(a.x[2]);
                    gate[j] = gates[choice];
                }
            }
#pragma unroll
            for (int j = 0; j < CHOICES; j++) {
                if (!is_here[j]) continue;
                float v[E];
                from[j].widen_to(v);
                for (int e = 0; e < E; e++) sum[e] += (Term)gate[j] * v[e];
            }
        }
        float v[E];
        for (int e = 0; e < E; e++) v[e] = (float)sum[e];
        Elements<E, T0>::put(out, row * width + c, v);
    }
}

// Rows of slots, slots, perhaps gates, to the sums of each token's rows, in the order of its choices.
// n = tokens that are no padding, tokens, samples that are no padding, samples, capacity, first slot,
// slots, width, choices, threads of a row, whether there are gates.
KERNEL(combine) {
    const Places places = {a.n[5], a.n[6], a.n[4], a.n[3]};
    for (i64 sample = blockIdx.y; sample < a.n[2]; sample += gridDim.y)
        FOR_ROWS(token, a.n[0], (u32)a.n[9]) {
            if (WIDE) combine_row<8>(a, places, sample, token);
            else combine_row<1>(a, places, sample, token);
        }
}

// Products of the rows of slots and of tokens, for the gates' gradients, a warp for each choice; zero
// where this rank has no slot. n as combine, but for the threads of a row.
KERNEL(gate_grad) {
    typedef typename Sum<T0>::type Term;
    In<T0> y(a.x[0]);
    In<T0> x(a.x[1]);
    In<i32> slots(a.x[2]);
    Out<f32> out(a.y[0]);
    const Places places = {a.n[5], a.n[6], a.n[4], a.n[3]};
    const i64 width = a.n[7], top_k = a.n[8];
    const int lane = threadIdx.x % 32;
    for (i64 sample = blockIdx.y; sample < a.n[2]; sample += gridDim.y)
        FOR_ROWS(i, a.n[0] * top_k, 32) {
            i64 rest;
            const i64 choice = sample * a.n[1] * top_k + i;
            const i64 from = (sample * a.n[1] + divide(i, top_k, rest)) * width;
            const i64 at = places.row(slots.raw(choice), sample) * width;
            Term sum = 0;
            if (at >= 0) {
                if (WIDE) {
#pragma unroll 2
                    for (i64 c = 8 * lane; c < width; c += 256) {
                        float v[8], w[8];
                        const Eight<T0> left = take8(y, at + c), right = take8(x, from + c);
                        widen8(left, v);
                        widen8(right, w);
                        for (int k = 0; k < 8; k++) sum += (Term)v[k] * w[k];
                    }
                } else {
                    for (i64 c = lane; c < width; c += 32) sum += (Term)y[at + c] * x[from + c];
                }
            }
            sum = lanes_sum(sum, 32);
            if (lane == 0) out.set(choice, (float)sum);
        }
}

// Rows of a thread that are on their way at a time.
#define ROWS 4

template <int E> DEVICE void add_bias(const Args &a) {
    In<T0> y(a.x[0]);
    In<T0> biases(a.x[1]);
    Out<T0> out(a.y[0]);
    const i64 rows = a.n[0], width = a.n[1], c = E * ((i64)blockIdx.x * blockDim.x + threadIdx.x);
    if (c >= width) return;
    for (i64 expert = blockIdx.z; expert < a.n[2]; expert += gridDim.z) {
        float bias[E];
        Elements<E, T0> from[ROWS];
        from[0].take(biases, expert * width + c);
        from[0].widen_to(bias);
        const i64 first = expert * rows * width + c;
        for (i64 row = blockIdx.y; row < rows; row += ROWS * gridDim.y) {
#pragma unroll
            for (int k = 0; k < ROWS; k++)
                if (const i64 at = row + k * (i64)gridDim.y; at < rows)
                    from[k].take(y, first + at * width);
#pragma unroll
            for (int k = 0; k < ROWS; k++) {
                const i64 at = row + k * (i64)gridDim.y;
                if (at >= rows) break;
                float v[E];
                from[k].widen_to(v);
                for (int e = 0; e < E; e++) v[e] += bias[e];
                Elements<E, T0>::put(out, first + at * width, v);
            }
        }
    }
}

// A bias for each expert on all its rows: a thread keeps its columns. n = rows of an expert, width,
// experts.
KERNEL(expert_bias) {
    if (WIDE) add_bias<8>(a);
    else add_bias<1>(a);
}

// Gate and up within their bounds. NaN stays what it is.
struct Clamped {
    float g, u, s;
    bool is_above, is_outside;
    __device__ __forceinline__ Clamped(float gate, float up, float alpha, float limit) {
        is_above = gate > limit;
        is_outside = up > limit || up < -limit;
        g = is_above ? limit : gate;
        u = up > limit ? limit : up < -limit ? -limit : up;
        s = reciprocal(1.0f + expf(-alpha * g));
    }
};

template <int E> DEVICE void clamped(const Args &a) {
    In<T0> gate(a.x[0]);
    In<T0> up(a.x[1]);
    Out<T0> y(a.y[0]);
    const float alpha = (float)a.f[0], limit = (float)a.f[1];
    FOR_PAIRS(first, a.n[0] / E) {
        Elements<E, T0> gates[AT_ONCE], ups[AT_ONCE];
        FOR_BOTH(k, i, first, a.n[0] / E) {
            gates[k].take(gate, E * i);
            ups[k].take(up, E * i);
        }
        FOR_BOTH(k, i, first, a.n[0] / E) {
            float v[E], w[E];
            gates[k].widen_to(v);
            ups[k].widen_to(w);
            for (int e = 0; e < E; e++) {
                const Clamped x(v[e], w[e], alpha, limit);
                v[e] = (x.u + 1.0f) * x.g * x.s;
            }
            Elements<E, T0>::put(y, E * i, v);
        }
    }
}

// The gated activation within bounds: n = elements; f = factor in the sigmoid, bound.
KERNEL(clamped_swiglu) {
    if (WIDE) clamped<8>(a);
    else clamped<1>(a);
}

template <int E> DEVICE void clamped_grad(const Args &a) {
    In<T0> gate(a.x[0]);
    In<T0> up(a.x[1]);
    In<T0> dy(a.x[2]);
    Out<T0> dgate(a.y[0]);
    Out<T0> dup(a.y[1]);
    const float alpha = (float)a.f[0], limit = (float)a.f[1];
    FOR_EACH(i, a.n[0] / E) {
        Elements<E, T0> gates, ups, dys;
        gates.take(gate, E * i);
        ups.take(up, E * i);
        dys.take(dy, E * i);
        float v[E], w[E], d[E];
        gates.widen_to(v);
        ups.widen_to(w);
        dys.widen_to(d);
        for (int e = 0; e < E; e++) {
            const Clamped x(v[e], w[e], alpha, limit);
            const float slope = x.s + alpha * x.g * x.s * (1.0f - x.s);
            v[e] = x.is_above ? 0.0f : d[e] * (x.u + 1.0f) * slope;
            w[e] = x.is_outside ? 0.0f : d[e] * x.g * x.s;
        }
        Elements<E, T0>::put(dgate, E * i, v);
        Elements<E, T0>::put(dup, E * i, w);
    }
}

// And its gradients for gate and up.
KERNEL(clamped_swiglu_grad) {
    if (WIDE) clamped_grad<8>(a);
    else clamped_grad<1>(a);
}
