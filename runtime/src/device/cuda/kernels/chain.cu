// Several functions of the same elements in one kernel.
//
// Each function that is compiled in is a macro `LINK_k`: its number, whether it has two arguments, and
// the numbers of these: 0 to 7 are operands (five at most), 8 + k is what function k makes.
// `WRITTEN_k` is the result that it is written as, if it is. Values stay in registers, in f32; one
// that is written is then used as it is written, as the functions one by one would.

#ifndef LINK_0
// SwiGLU's forward part, where nobody says what else.
#define CHAIN_OPERANDS 2
#define LINK_0 4, 0, 0, 0
#define WRITTEN_0 0
#define LINK_1 2, 1, 8, 1
#define WRITTEN_1 1
#endif

template <int N> DEVICE void function(int f, int has_two, int first, int second, float (*v)[N],
                                      float *to, float by) {
#pragma unroll
    for (int k = 0; k < N; k++) to[k] = v[first][k];
    if (has_two) function_of_two<N>(f, to, v[second]);
    else function_of_one<N>(f, to, by);
}
template <class T, int N> DEVICE void round_as(float *v) {
#pragma unroll
    for (int k = 0; k < N; k++) v[k] = as_stored<T>(v[k]);
}

// The text for each operand, function or result that there is.
#if CHAIN_OPERANDS > 0
#define OPERAND_0(X) X(0)
#else
#define OPERAND_0(X)
#endif
#if CHAIN_OPERANDS > 1
#define OPERAND_1(X) X(1)
#else
#define OPERAND_1(X)
#endif
#if CHAIN_OPERANDS > 2
#define OPERAND_2(X) X(2)
#else
#define OPERAND_2(X)
#endif
#if CHAIN_OPERANDS > 3
#define OPERAND_3(X) X(3)
#else
#define OPERAND_3(X)
#endif
#if CHAIN_OPERANDS > 4
#define OPERAND_4(X) X(4)
#else
#define OPERAND_4(X)
#endif
#define OPERANDS(X) OPERAND_0(X) OPERAND_1(X) OPERAND_2(X) OPERAND_3(X) OPERAND_4(X)

#ifdef WRITTEN_0
#define RESULT_0(X) X(0, WRITTEN_0)
#else
#define RESULT_0(X)
#endif
#ifdef WRITTEN_1
#define RESULT_1(X) X(1, WRITTEN_1)
#else
#define RESULT_1(X)
#endif
#ifdef WRITTEN_2
#define RESULT_2(X) X(2, WRITTEN_2)
#else
#define RESULT_2(X)
#endif
#ifdef WRITTEN_3
#define RESULT_3(X) X(3, WRITTEN_3)
#else
#define RESULT_3(X)
#endif
#define RESULTS(X) RESULT_0(X) RESULT_1(X) RESULT_2(X) RESULT_3(X)

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define ROUND(k, r) round_as<JOIN(O, r), N>(v[8 + k]);

// All functions, of values that begin with the operands.
template <int N> DEVICE void functions(float (*v)[N], const double *by) {
    function<N>(LINK_0, v, v[8], (float)by[0]);
    RESULT_0(ROUND)
#ifdef LINK_1
    function<N>(LINK_1, v, v[9], (float)by[1]);
    RESULT_1(ROUND)
#endif
#ifdef LINK_2
    function<N>(LINK_2, v, v[10], (float)by[2]);
    RESULT_2(ROUND)
#endif
#ifdef LINK_3
    function<N>(LINK_3, v, v[11], (float)by[3]);
    RESULT_3(ROUND)
#endif
}

#define OPERAND(i) In<T##i> x##i(a.x[i]);
#define PLACE(k, r) Out<JOIN(O, r)> out##k(a.y[r]);
#define PIECE(i) Eight<T##i> piece##i[AT_ONCE];
#define TAKE(i) piece##i[k] = take8(x##i, 8 * at);
#define WIDEN(i) widen8(piece##i[k], v[i]);
#define STORE(k, r) store8(out##k, 8 * at, v[8 + k]);
#define LOAD_ONE(i) v[i][0] = x##i[at];
#define STORE_ONE(k, r) out##k.set(at, v[8 + k][0]);

// n = elements; f = the factor of each function.
KERNEL(chain) {
    OPERANDS(OPERAND)
    RESULTS(PLACE)
    if (WIDE) {
        float v[12][8];
        FOR_PAIRS(first, a.n[0] / 8) {
            OPERANDS(PIECE)
            FOR_BOTH(k, at, first, a.n[0] / 8) { OPERANDS(TAKE) }
            FOR_BOTH(k, at, first, a.n[0] / 8) {
                OPERANDS(WIDEN)
                functions<8>(v, a.f);
                RESULTS(STORE)
            }
        }
        return;
    }
    float v[12][1];
    FOR_EACH(at, a.n[0]) {
        OPERANDS(LOAD_ONE)
        functions<1>(v, a.f);
        RESULTS(STORE_ONE)
    }
}
