/* The product of two float8 matrices, for CPUs with bfloat16 dot products in AVX-512 and no AMX (AMD since Zen 4).
 *
 *     out [m, n] = RN(RN(sum * RN(a_scale * b_scale)) + bias)      sum over k of a [m, k] * b [k, n] in float32
 *
 * Operands are widened while they are packed (pack.h), so none is ever widened as a whole. Scales come last, so any
 * will do. Sums are those of a loop over ascending k that rounds to float32 at each step: a dot product of pairs adds
 * the product of the high halves, rounds, adds that of the low ones, and rounds. So an element depends on its row and
 * its column only: not on threads, and not on what other rows and columns there are. The instruction takes subnormals
 * for 0, but meets none: codes are multiples of 2^-16, and their products and sums of 2^-32.
 *
 * The smaller operand is packed panel by panel for all threads. The larger is shared out between them; each packs a
 * chunk at a time, which stays in its second cache, and multiplies it with all of the panel. Sums go through memory
 * every DEPTH numbers, so that what a tile reads stays in the second cache too.
 */
#ifndef QUAVER_MATMUL_H
#define QUAVER_MATMUL_H

#include "pack.h"

#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 12 : defined(__GNUC__) && __GNUC__ >= 10)
#define HAS_MATMUL 1
#include <cpuid.h>
#else
#define HAS_MATMUL 0
#endif

enum {
    DEPTH = 2048,          /* along k; even */
    CHUNK = 4,             /* groups of the larger operand */
    LEAST_PANEL = 32,      /* groups of the smaller operand, and */
    PANEL_WORDS = 1 << 18, /* words, of which a panel has at least as many, if there are */
    PART = 8,              /* groups of the panel, whose sums with a chunk are kept at once; even */
    TILE = 8 * 32,         /* sums in registers */
};

typedef struct {
    Factor a, b;
    const float *a_scale, *b_scale, *bias; /* one or [m], one or [n], [n] or NULL */
    int rowwise_a, rowwise_b, hp_kind, threads;
    char *out;      /* [m, n] of hp_kind */
    uint32_t *room; /* room_of words, aligned to 64 bytes */
} Product;

/* How a product is cut, in groups. `own` ones are those of the larger operand, `shared` ones those of the smaller. */
typedef struct {
    int by_rows, threads; /* by_rows: the larger operand is a */
    int64_t own, shared, panel, chunk;
    int64_t group, sums; /* words of a packed group, and of the sums that a thread keeps */
} Cut;

static Cut cut_of(int64_t m, int64_t k, int64_t n, int threads) {
    Cut cut = {.by_rows = m >= n, .group = (k + 1) / 2 * GROUP, .sums = TILE};
    cut.own = groups_of(cut.by_rows ? m : n), cut.shared = groups_of(cut.by_rows ? n : m);
    cut.threads = (int)least(threads, cut.own ? cut.own : 1);
    cut.chunk = least(CHUNK, (cut.own + cut.threads - 1) / cut.threads);
    int64_t most = PANEL_WORDS / (cut.group ? cut.group : 1);
    most = most < LEAST_PANEL ? LEAST_PANEL : most;
    const int64_t panels = (cut.shared + most - 1) / most;
    cut.panel = panels ? (cut.shared + panels - 1) / panels : 0; /* alike, and by twos, as tiles take columns */
    cut.panel += cut.panel % 2;
    const int64_t of_a = cut.by_rows ? cut.chunk : PART, of_b = cut.by_rows ? PART : cut.chunk;
    if (k > DEPTH) cut.sums = 2 * of_a * ((of_b + 1) / 2) * TILE;
    return cut;
}

/* Words that a product packs into. */
static int64_t room_of(int64_t m, int64_t k, int64_t n, int threads) {
    const Cut cut = cut_of(m, k, n, threads);
    return cut.panel * cut.group + cut.threads * (cut.chunk * cut.group + cut.sums);
}

#if HAS_MATMUL

#define TARGET_BF16 target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")
#define AVX512_BF16 __attribute__((TARGET_BF16))
#define AVX512_BF16_INLINE static inline __attribute__((always_inline, TARGET_BF16))

/* Bits of cpuid's leaf 7: of subleaf 1 in EAX, of subleaf 0 in EDX. */
enum { BIT_AVX512_BF16 = 1 << 5, BIT_AMX_BF16 = 1 << 22 };

static int has_matmul(void) {
    unsigned subleafs, eax, ebx, ecx, edx;
    if (!has_avx512() || !__get_cpuid_count(7, 0, &subleafs, &ebx, &ecx, &edx)) return 0;
    if (subleafs < 1 || edx & BIT_AMX_BF16) return 0;
    __cpuid_count(7, 1, eax, ebx, ecx, edx);
    return (eax & BIT_AVX512_BF16) != 0;
}

#define EIGHT(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)

/* sums [8][32] (+)= half of a group of a times a group of b, or two, `pairs` words of each line. */
AVX512_BF16_INLINE void multiply_tile_body(const uint32_t *a, const uint32_t *b, const uint32_t *second_b, int two,
                                           int64_t pairs, int first, float *sums) {
#define BEGIN(I) \
    __m512 left##I = first ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + 32 * I); \
    __m512 right##I = first || !two ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + 32 * I + 16);
#define ADD(I) \
    { \
        const __m512bh of_a = (__m512bh)_mm512_set1_epi32((int)a[I]); \
        left##I = _mm512_dpbf16_ps(left##I, of_a, of_b); \
        if (two) right##I = _mm512_dpbf16_ps(right##I, of_a, of_second_b); \
    }
#define STORE(I) \
    _mm512_storeu_ps(sums + 32 * I, left##I); \
    if (two) _mm512_storeu_ps(sums + 32 * I + 16, right##I);
    EIGHT(BEGIN)
    for (int64_t p = 0; p < pairs; p++, a += GROUP, b += GROUP, second_b += GROUP) {
        const __m512bh of_b = (__m512bh)_mm512_loadu_si512(b);
        const __m512bh of_second_b = (__m512bh)_mm512_loadu_si512(two ? second_b : b);
        EIGHT(ADD)
    }
    EIGHT(STORE)
#undef STORE
#undef ADD
#undef BEGIN
}

AVX512_BF16 static void multiply_tile(const uint32_t *a, const uint32_t *b, int64_t to_second_b, int64_t pairs,
                                      int first, float *sums) {
    if (to_second_b) multiply_tile_body(a, b, b + to_second_b, 1, pairs, first, sums);
    else multiply_tile_body(a, b, b, 0, pairs, first, sums);
}

enum { SUBNORMAL = 0x20 }; /* a class of numbers to AVX-512 */

/* float32 -> bfloat16, ties to even. The instruction takes subnormals for 0, so where there are any, integers do it. */
AVX512_BF16_INLINE __m512i rounded_to_bfloat16(__m512 left, __m512 right) {
    if (!(_mm512_fpclass_ps_mask(left, SUBNORMAL) | _mm512_fpclass_ps_mask(right, SUBNORMAL)))
        return (__m512i)_mm512_cvtne2ps_pbh(right, left);
    uint32_t bits[32];
    uint16_t rounded[32];
    _mm512_storeu_ps(bits, left), _mm512_storeu_ps(bits + 16, right);
    for (int i = 0; i < 32; i++) rounded[i] = bfloat16_of(float_of(bits[i]));
    return _mm512_loadu_si512(rounded);
}

/* Two vectors of numbers side by side -> out, those that are there. */
AVX512_BF16_INLINE void store(__m512 left, __m512 right, __mmask32 there, int hp_kind, char *out) {
    if (hp_kind == FLOAT32) {
        _mm512_mask_storeu_ps((float *)out, (__mmask16)there, left);
        _mm512_mask_storeu_ps((float *)out + 16, (__mmask16)(there >> 16), right);
        return;
    }
    __m512i rounded;
    if (hp_kind == BFLOAT16) {
        rounded = rounded_to_bfloat16(left, right);
    } else {
        rounded = _mm512_castsi256_si512(_mm512_cvtps_ph(left, _MM_FROUND_TO_NEAREST_INT));
        rounded = _mm512_inserti64x4(rounded, _mm512_cvtps_ph(right, _MM_FROUND_TO_NEAREST_INT), 1);
    }
    if (there == ~(__mmask32)0) _mm512_storeu_si512(out, rounded);
    else _mm512_mask_storeu_epi16(out, there, rounded);
}

AVX512_BF16_INLINE void finish_body(const Product *product, int hp_kind, const float *sums, int64_t row, int64_t column,
                                    int64_t columns) {
    const int64_t rows = least(8, product->a.lines - row), n = product->b.lines;
    const int size = hp_kind == FLOAT32 ? 4 : 2;
    const __mmask32 there = columns < 32 ? ((__mmask32)1 << columns) - 1 : ~(__mmask32)0;
    const __mmask16 there_left = (__mmask16)there, there_right = (__mmask16)(there >> 16);
    const float *b_scale = product->b_scale, *bias = product->bias;
    __m512 left_scale = _mm512_set1_ps(*b_scale), right_scale = left_scale;
    __m512 left_bias = _mm512_setzero_ps(), right_bias = left_bias;
    if (product->rowwise_b) {
        left_scale = _mm512_maskz_loadu_ps(there_left, b_scale + column);
        right_scale = _mm512_maskz_loadu_ps(there_right, b_scale + column + 16);
    }
    if (bias) {
        left_bias = _mm512_maskz_loadu_ps(there_left, bias + column);
        right_bias = _mm512_maskz_loadu_ps(there_right, bias + column + 16);
    }
    for (int64_t i = 0; i < rows; i++, sums += 32) {
        const __m512 a_scale = _mm512_set1_ps(product->a_scale[product->rowwise_a ? row + i : 0]);
        __m512 left = _mm512_mul_ps(_mm512_loadu_ps(sums), _mm512_mul_ps(a_scale, left_scale));
        __m512 right = _mm512_mul_ps(_mm512_loadu_ps(sums + 16), _mm512_mul_ps(a_scale, right_scale));
        if (bias) left = _mm512_add_ps(left, left_bias), right = _mm512_add_ps(right, right_bias);
        store(left, right, there, hp_kind, product->out + ((row + i) * n + column) * size);
    }
}

/* sums [8][32] of the rows from `row` and of `columns` columns from `column` on -> out. */
AVX512_BF16 static void finish(const Product *product, const float *sums, int64_t row, int64_t column,
                               int64_t columns) {
    if (product->hp_kind == FLOAT32) finish_body(product, FLOAT32, sums, row, column, columns);
    else if (product->hp_kind == BFLOAT16) finish_body(product, BFLOAT16, sums, row, column, columns);
    else finish_body(product, FLOAT16, sums, row, column, columns);
}

/* Some packed groups of one operand: words [k / DEPTH][groups][DEPTH / 2][16], those from `first` on in the matrix. */
typedef struct { uint32_t *words; int64_t first, groups; } Packed;

/* A group at `k`, where it has so many pairs up to the next depth. */
INLINE uint32_t *words_at(Packed packed, int64_t group, int64_t k, int64_t pairs) {
    return packed.words + (k / 2 * packed.groups + group * pairs) * GROUP;
}

/* All of k of the groups from `begin` to `end`. */
static void pack_all(const Factor *factor, Packed packed, int64_t begin, int64_t end) {
    for (int64_t k = 0; k < factor->k; k += DEPTH) {
        const int64_t depth = least(DEPTH, factor->k - k);
        pack(factor, packed.first + begin, end - begin, k, depth, words_at(packed, begin, k, (depth + 1) / 2));
    }
}

/* Asks for the memory that `finish` will write, while the sums are still made. */
static void fetch(const Product *product, int64_t row, int64_t column) {
    const int64_t n = product->b.lines, size = product->hp_kind == FLOAT32 ? 4 : 2;
    const char *out = product->out + (row * n + column) * size;
    for (int64_t i = 0; i < least(8, product->a.lines - row); i++, out += n * size) {
        __builtin_prefetch(out, 1);
        if (product->hp_kind == FLOAT32) __builtin_prefetch(out + 64, 1);
    }
}

/* Adds what lies along k from `from` to the next DEPTH, to the sums of `a_groups` and `b_groups`; finishes the last. */
static void multiply_part(const Product *product, Packed a, int64_t from_a, int64_t a_groups, Packed b, int64_t from_b,
                          int64_t b_groups, int64_t from, float *sums) {
    const int64_t k = product->a.k, pairs = (least(DEPTH, k - from) + 1) / 2;
    const int last = from + DEPTH >= k;
    for (int64_t j = from_b; j < from_b + b_groups; j += 2) {
        const int64_t to_second = j + 1 < from_b + b_groups ? pairs * GROUP : 0, column = (b.first + j) * GROUP;
        const int64_t columns = least(to_second ? 32 : 16, product->b.lines - column);
        for (int64_t i = 2 * from_a; i < 2 * (from_a + a_groups); i++) {
            const int64_t row = a.first * GROUP + i * 8;
            if (last) fetch(product, row, column);
            multiply_tile(words_at(a, i / 2, from, pairs) + i % 2 * 8, words_at(b, j, from, pairs), to_second, pairs,
                          from == 0, sums);
            if (last) finish(product, sums, row, column, columns);
            if (k > DEPTH) sums += TILE;
        }
    }
}

/* A packed chunk times the packed panel. */
static void multiply_chunk(const Product *product, int by_rows, Packed chunk, Packed panel, float *sums) {
    for (int64_t at = 0; at < panel.groups; at += PART) {
        const int64_t groups = least(PART, panel.groups - at);
        for (int64_t from = 0; from == 0 || from < product->a.k; from += DEPTH) {
            if (by_rows) multiply_part(product, chunk, 0, chunk.groups, panel, at, groups, from, sums);
            else multiply_part(product, panel, at, groups, chunk, 0, chunk.groups, from, sums);
        }
    }
}

/* What `worker` does with a panel: its share of the groups of the larger operand, by chunks. */
static void multiply_share(const Product *product, const Cut *cut, int worker, Packed panel) {
    uint32_t *words = product->room + cut->panel * cut->group + worker * (cut->chunk * cut->group + cut->sums);
    float *sums = (float *)(words + cut->chunk * cut->group);
    const int64_t end = cut->own * (worker + 1) / cut->threads;
    for (int64_t own = cut->own * worker / cut->threads; own < end; own += cut->chunk) {
        const Packed chunk = {words, own, least(cut->chunk, end - own)};
        pack_all(cut->by_rows ? &product->a : &product->b, chunk, 0, chunk.groups);
        multiply_chunk(product, cut->by_rows, chunk, panel, sums);
    }
}

static int multiply_matrices(const Product *product) {
    const Cut cut = cut_of(product->a.lines, product->a.k, product->b.lines, product->threads);
    const Factor *smaller = cut.by_rows ? &product->b : &product->a;
    for (int64_t shared = 0; shared < cut.shared; shared += cut.panel) {
        const Packed panel = {product->room, shared, least(cut.panel, cut.shared - shared)};
#pragma omp parallel for num_threads(cut.threads) schedule(static, 1) if (cut.threads > 1)
        for (int worker = 0; worker < cut.threads; worker++)
            pack_all(smaller, panel, panel.groups * worker / cut.threads, panel.groups * (worker + 1) / cut.threads);
#pragma omp parallel for num_threads(cut.threads) schedule(static, 1) if (cut.threads > 1)
        for (int worker = 0; worker < cut.threads; worker++) multiply_share(product, &cut, worker, panel);
    }
    return 0;
}

#else

static int has_matmul(void) { return 0; }
static int multiply_matrices(const Product *product) { (void)product; return 0; }

#endif

static int runs_matmul; /* has_matmul, when the module was loaded; asking takes longer than a small product */

#endif
