/* The product of two float8 matrices, for CPUs with bfloat16 dot products in AVX-512 and no AMX (AMD since Zen 4).
 *
 *     out [m, n] = RN(RN(sum * RN(a_scale * b_scale)) + bias)      sum over k of a [m, k] * b [k, n] in float32
 *
 * Operands are widened to bfloat16 while they are packed, never as a whole. Scales are applied last, so they may have
 * any value. Along k a loop sums slabs of DEPTH in ascending order, rounding to float32 at each step (a dot product of
 * pairs adds the product of the high halves, then the product of the low halves). The sums of slabs are added in order,
 * so errors grow with DEPTH + k / DEPTH. An element depends on its row and its column only, not on threads. The
 * instruction flushes subnormals to 0, but none occur: codes are multiples of 2^-16, and their products and sums of
 * 2^-32.
 *
 * A line is a row of a or a column of b; sums run along lines. Lines are packed in groups of 32, k in slabs of DEPTH:
 *
 *     words [slabs][groups][DEPTH / 2][32]     a word has a line's numbers at k, in the high half, and at k + 1
 *
 * Elements outside the matrix are 0. A panel of b is packed for all threads, which divide the rows of a. A thread packs
 * one chunk of its rows at a time, which stays in its L2 cache, and multiplies it with the whole panel. Sums are stored
 * in memory between slabs, so that the operands of a tile stay in the L2 cache too.
 */
#ifndef QUAVER_MATMUL_H
#define QUAVER_MATMUL_H

#include "lookup.h"

typedef struct {
    const uint8_t *codes;
    int float8;
    int64_t to_line, to_k; /* the strides of codes between lines and within a line; one of them is 1 */
    const float *scale;
    int per_line; /* whether there is one scale per line */
    int64_t lines, k;
} Factor;

typedef struct {
    Factor a, b;
    const float *bias; /* [n] or NULL */
    int hp_kind, threads;
    char *out; /* [m, n] of float32 or bfloat16 */
} Product;

#if HAS_VECTORS
#include <cpuid.h>

#define AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")))

enum {
    GROUP = 32,   /* lines packed side by side */
    DEPTH = 2048, /* along k; even */
    CHUNK = 64,   /* rows of a; a multiple of GROUP, as is PANEL */
    PANEL = 512,  /* columns of b */
    TILE = 8,     /* rows of a whose products with a group of b are summed in registers */
};

static int has_matmul(void) {
    unsigned subleafs, eax, ebx, ecx, edx;
    if (!has_avx512() || !__get_cpuid_count(7, 0, &subleafs, &ebx, &ecx, &edx)) return 0;
    if (subleafs < 1 || edx >> 22 & 1 /* AMX_BF16 */) return 0;
    __cpuid_count(7, 1, eax, ebx, ecx, edx);
    return eax >> 5 & 1; /* AVX512_BF16 */
}

INLINE int64_t groups_of(int64_t lines) { return (lines + GROUP - 1) / GROUP; }
INLINE int64_t pairs_of(int64_t depth) { return (depth + 1) / 2; }

/* Packed lines of an operand, beginning at line `first` of the matrix. */
typedef struct { uint32_t *words; int64_t first, lines; } Packed;

/* A group in the slab that starts at `k`. */
INLINE uint32_t *words_at(Packed packed, int64_t group, int64_t k, int64_t depth) {
    return packed.words + (k / 2 * groups_of(packed.lines) + group * pairs_of(depth)) * GROUP;
}

/* ---- packing -----------------------------------------------------------------------------------------------------*/

/* 16 codes of each of four lines: the first, fifth, ninth and thirteenth. */
AVX512_INLINE __m512i every_fourth(const uint8_t *codes, int64_t to_line) {
#define LINE(I) _mm_loadu_si128((const __m128i *)(codes + (I) * to_line))
    __m512i lines = _mm512_castsi128_si512(LINE(0));
    lines = _mm512_mask_broadcast_i32x4(lines, 0x00F0, LINE(4));
    lines = _mm512_mask_broadcast_i32x4(lines, 0x0F00, LINE(8));
    return _mm512_mask_broadcast_i32x4(lines, 0xF000, LINE(12));
#undef LINE
}

/* 16 contiguous codes of 16 lines -> `pairs` rows of 16 words: pairs of codes are transposed, then looked up. */
AVX512_INLINE void pack_block(Lookup lookup, const uint8_t *codes, int64_t to_line, int64_t pairs, uint32_t *words) {
    const __m512i swap = _mm512_set4_epi32(0x0E0F0C0D, 0x0A0B0809, 0x06070405, 0x02030001);
    __m512i line[4], quads[4], by_pair[4], row[8];
    for (int i = 0; i < 4; i++) line[i] = _mm512_shuffle_epi8(every_fourth(codes + i * to_line, to_line), swap);
    for (int i = 0; i < 2; i++) {
        quads[i] = _mm512_unpacklo_epi16(line[2 * i], line[2 * i + 1]);
        quads[2 + i] = _mm512_unpackhi_epi16(line[2 * i], line[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        by_pair[2 * i] = _mm512_unpacklo_epi32(quads[2 * i], quads[2 * i + 1]);
        by_pair[2 * i + 1] = _mm512_unpackhi_epi32(quads[2 * i], quads[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) look_up(lookup, by_pair[i], &row[2 * i], &row[2 * i + 1]);
    for (int i = 0; i < 8; i++)
        if (i < pairs) _mm512_storeu_si512(words + i * GROUP, row[i]);
}

/* `depth` codes of up to 32 contiguous lines -> words [depth / 2][32]. */
AVX512_INLINE void pack_lines(Lookup lookup, const uint8_t *codes, int64_t to_line, int64_t lines, int64_t depth,
                              uint32_t *words) {
    for (int64_t half = 0; half < GROUP; half += 16)
        for (int64_t k = 0; k < depth; k += 16) {
            const int64_t there = least(16, lines - half), count = least(16, depth - k);
            const uint8_t *block = codes + half * to_line + k;
            uint32_t *packed = words + k / 2 * GROUP + half;
            if (there == 16 && count == 16) {
                pack_block(lookup, block, to_line, 8, packed);
                continue;
            }
            uint8_t padded[16 * 16] = {0};
            for (int64_t i = 0; i < there; i++) memcpy(padded + i * 16, block + i * to_line, count);
            pack_block(lookup, padded, 16, pairs_of(count), packed);
        }
}

/* `depth` codes of up to 32 lines whose codes at one k are contiguous -> words [depth / 2][32]. */
AVX512_INLINE void pack_columns(Lookup lookup, const uint8_t *codes, int64_t to_k, int64_t lines, int64_t depth,
                                uint32_t *words) {
    const __m512i first_lanes = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __mmask32 there = lines >= GROUP ? ~(__mmask32)0 : ((__mmask32)1 << lines) - 1;
    for (int64_t k = 0; k < depth; k += 2, words += GROUP) {
        __m256i even = _mm256_maskz_loadu_epi8(there, codes + k * to_k), odd = _mm256_setzero_si256();
        if (k + 1 < depth) odd = _mm256_maskz_loadu_epi8(there, codes + (k + 1) * to_k);
        __m512i pairs = _mm512_slli_epi16(_mm512_cvtepu8_epi16(even), 8), first, second;
        pairs = _mm512_or_si512(pairs, _mm512_cvtepu8_epi16(odd));
        look_up(lookup, _mm512_permutexvar_epi64(first_lanes, pairs), &first, &second);
        _mm512_storeu_si512(words, first);
        _mm512_storeu_si512(words + 16, second);
    }
}

/* Packs the groups from `begin` to `end` of `packed`, for all of k. */
AVX512 static void pack(const Factor *factor, Packed packed, int64_t begin, int64_t end) {
    const Lookup lookup = lookup_of(factor->float8);
    for (int64_t k = 0; k < factor->k; k += DEPTH)
        for (int64_t group = begin; group < end; group++) {
            const int64_t depth = least(DEPTH, factor->k - k), lines = packed.lines - group * GROUP;
            const uint8_t *codes = factor->codes + (packed.first + group * GROUP) * factor->to_line + k * factor->to_k;
            uint32_t *words = words_at(packed, group, k, depth);
            if (factor->to_k == 1) pack_lines(lookup, codes, factor->to_line, lines, depth, words);
            else pack_columns(lookup, codes, factor->to_k, lines, depth, words);
        }
}

/* ---- multiplying -------------------------------------------------------------------------------------------------*/

/* sums [8][32] (+)= 8 lines of a group of a times a group of b, over one slab. */
AVX512_BF16 static void multiply_tile(const uint32_t *a, const uint32_t *b, int64_t pairs, int first, float *sums) {
    __m512 left[TILE], right[TILE];
#pragma GCC unroll 8
    for (int i = 0; i < TILE; i++) {
        left[i] = right[i] = _mm512_setzero_ps();
    }
    for (int64_t p = 0; p < pairs; p++, a += GROUP, b += GROUP) {
        const __m512bh of_left = (__m512bh)_mm512_loadu_si512(b), of_right = (__m512bh)_mm512_loadu_si512(b + 16);
#pragma GCC unroll 8
        for (int i = 0; i < TILE; i++) {
            const __m512bh of_a = (__m512bh)_mm512_set1_epi32((int)a[i]);
            left[i] = _mm512_dpbf16_ps(left[i], of_a, of_left);
            right[i] = _mm512_dpbf16_ps(right[i], of_a, of_right);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < TILE; i++) {
        if (!first) left[i] = _mm512_add_ps(_mm512_loadu_ps(sums + i * GROUP), left[i]);
        if (!first) right[i] = _mm512_add_ps(_mm512_loadu_ps(sums + i * GROUP + 16), right[i]);
        _mm512_storeu_ps(sums + i * GROUP, left[i]);
        _mm512_storeu_ps(sums + i * GROUP + 16, right[i]);
    }
}

/* sums [rows][32] -> out, from `row` and `column` on. */
AVX512_BF16 static void finish(const Product *product, const float *sums, int64_t row, int64_t rows, int64_t column) {
    const Factor *a = &product->a, *b = &product->b;
    const int64_t n = b->lines, columns = least(GROUP, n - column), size = product->hp_kind == FLOAT32 ? 4 : 2;
    float scales[GROUP], biases[GROUP], values[GROUP];
    uint16_t rounded[GROUP];
    for (int64_t j = 0; j < GROUP; j++) {
        scales[j] = b->scale[b->per_line && j < columns ? column + j : 0];
        biases[j] = product->bias && j < columns ? product->bias[column + j] : -0.0f; /* adding -0 changes no sum */
    }
    for (int64_t i = 0; i < rows; i++) {
        const float a_scale = a->scale[a->per_line ? row + i : 0];
        char *out = product->out + ((row + i) * n + column) * size;
        for (int64_t j = 0; j < GROUP; j++) values[j] = sums[i * GROUP + j] * (a_scale * scales[j]) + biases[j];
        for (int64_t j = 0; j < GROUP; j++) rounded[j] = bfloat16_of(values[j]);
        const void *line = product->hp_kind == FLOAT32 ? (const void *)values : rounded;
        if (columns < GROUP) memcpy(out, line, columns * size);
        else if (product->hp_kind == FLOAT32) memcpy(out, line, sizeof values);
        else memcpy(out, line, sizeof rounded);
    }
}

/* A packed chunk of a times the packed panel of b. `sums`: [chunk][32], per group of b if there are several slabs. */
static void multiply_chunk(const Product *product, Packed chunk, Packed panel, float *sums) {
    const int64_t k = product->a.k, size = product->hp_kind == FLOAT32 ? 4 : 2, to_row = product->b.lines * size;
    for (int64_t from = 0; from == 0 || from < k; from += DEPTH) {
        const int64_t depth = least(DEPTH, k - from);
        for (int64_t j = 0; j < groups_of(panel.lines); j++) {
            float *strip = sums + (k > DEPTH ? j * CHUNK * GROUP : 0);
            const char *out = product->out + chunk.first * to_row + (panel.first + j * GROUP) * size;
            for (int64_t i = 0; i < chunk.lines; i += TILE) {
                for (int64_t row = i; row < least(i + TILE, chunk.lines); row++) /* prefetch what `finish` writes */
                    __builtin_prefetch(out + row * to_row, 1);
                const uint32_t *of_a = words_at(chunk, i / GROUP, from, depth) + i % GROUP;
                multiply_tile(of_a, words_at(panel, j, from, depth), pairs_of(depth), from == 0, strip + i * GROUP);
            }
            if (from + DEPTH >= k) finish(product, strip, chunk.first, chunk.lines, panel.first + j * GROUP);
        }
    }
}

/* Returns 0, or -1 if out of memory. */
static int multiply_matrices(const Product *product) {
    const Factor *a = &product->a, *b = &product->b;
    const int threads = product->threads;
    const int64_t tiles = (a->lines + TILE - 1) / TILE, line_words = pairs_of(a->k);
    const int64_t panel_words = least(PANEL, groups_of(b->lines) * GROUP) * line_words;
    const int64_t chunk_words = least(CHUNK, groups_of(a->lines) * GROUP) * line_words;
    const int64_t thread_words = chunk_words + CHUNK * (a->k > DEPTH ? PANEL : GROUP);
    char *room = malloc((panel_words + threads * thread_words) * sizeof(uint32_t) + 64);
    if (room == NULL) return -1;
    uint32_t *words = (uint32_t *)(((uintptr_t)room + 63) & ~(uintptr_t)63);
    for (int64_t column = 0; column < b->lines; column += PANEL) {
        const Packed panel = {words, column, least(PANEL, b->lines - column)};
        const int64_t groups = groups_of(panel.lines);
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
        for (int thread = 0; thread < threads; thread++)
            pack(b, panel, groups * thread / threads, groups * (thread + 1) / threads);
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
        for (int thread = 0; thread < threads; thread++) {
            uint32_t *own = words + panel_words + thread * thread_words;
            const int64_t end = least(tiles * (thread + 1) / threads * TILE, a->lines);
            for (int64_t row = tiles * thread / threads * TILE; row < end; row += CHUNK) {
                const Packed chunk = {own, row, least(CHUNK, end - row)};
                pack(a, chunk, 0, groups_of(chunk.lines));
                multiply_chunk(product, chunk, panel, (float *)(own + chunk_words));
            }
        }
    }
    free(room);
    return 0;
}

#else

static int has_matmul(void) { return 0; }
static int multiply_matrices(const Product *product) { (void)product; return 0; }

#endif

static int runs_matmul; /* has_matmul, when the module was loaded */

#endif
