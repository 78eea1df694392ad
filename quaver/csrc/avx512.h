/* The runs that take most of a linear's time, for CPUs with AVX-512 VBMI (Intel since Ice Lake, AMD since Zen 4): casts
 * from float32 and bfloat16, and float8 to bfloat16. The bits are those of runs.h, in half the time or less.
 *
 * A block is 64 elements, whose codes fill a vector. What is rare in a block (NaN, inf, more than the largest number)
 * is not looked after here: the whole block goes to runs.h.
 */
#ifndef QUAVER_AVX512_H
#define QUAVER_AVX512_H

#include "runs.h"

enum { BLOCK = 64 };

/* What added to a bfloat16 number multiplies it by `scale`. Returns whether there is such a number, for all of float8:
 * if scale is 2^k, and results are not subnormal. */
INLINE int shift_of(float scale, int16_t *shift) {
    const uint32_t bits = bits_of(scale), k = (bits >> 23) - 127;
    *shift = (int16_t)(k << 7);
    return (bits & 0x007FFFFFu) == 0 && k + 100 <= 200;
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define TARGET target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi")
#define AVX512 __attribute__((TARGET))
#define AVX512_INLINE static inline __attribute__((always_inline, TARGET))

/* Of two vectors, the bytes that one takes: filled with the tables below when the module is loaded. */
static struct {
    uint8_t of_pairs[64];  /* low bytes of the 16 words of each in turn, twice */
    uint8_t of_words[64];  /* low bytes of the 32 words of both, twice */
    uint8_t of_halves[64]; /* low bytes of the 64 half words of both */
} low_bytes;
static uint16_t bfloat16_of_code[2][128]; /* by float8 kind, without sign */

static int has_avx512(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

static void fill_tables(void) {
    for (int i = 0; i < 64; i++) {
        low_bytes.of_pairs[i] = (uint8_t)(i % 2 * 64 + i / 2 % 16 * 4);
        low_bytes.of_words[i] = (uint8_t)(i % 32 * 4);
        low_bytes.of_halves[i] = (uint8_t)(i * 2);
    }
    for (int code = 0; code < 256; code++)
        bfloat16_of_code[code / 128][code % 128] = (uint16_t)(bits_of(decode(code % 128, FLOAT8[code / 128])) >> 16);
}

/* Bytes `at`, and `further` than those, of two vectors. */
AVX512_INLINE __m512i take(__m512i first, const uint8_t *at, int further, __m512i second) {
    __m512i indices = _mm512_add_epi8(_mm512_loadu_si512(at), _mm512_set1_epi8((char)further));
    return _mm512_permutex2var_epi8(first, indices, second);
}

AVX512_INLINE __m512i halves_of(__m512i low, __m512i high) { return _mm512_mask_blend_epi64(0xF0, low, high); }

/* `magnitudes` with the top bits of `signs`, in each byte. */
AVX512_INLINE __m512i with_signs(__m512i magnitudes, __m512i signs) {
    return _mm512_ternarylogic_epi32(_mm512_set1_epi8((char)0x80), signs, magnitudes, 0xCA);
}

/* ---- casts -------------------------------------------------------------------------------------------------------*/

/* Magnitudes * scale -> codes + CODE_OF_ZERO, in low bytes, as `encode` does it. Here one operation makes the addend,
 * a power of two times 2^(23 - mantissa_bits), and adds; and the exponent is read off the sum. `unfit`: those that are
 * too large, or not numbers. */
AVX512_INLINE __m512i encode_16(__m512i magnitude, __m512 scale, Format f, __mmask16 *unfit) {
    const int drop = 23 - f.mantissa_bits;
    const __m512i largest = _mm512_set1_epi32((int)bits_of(f.max) + 0x100); /* what is above, but rounds to it, fits */
    const __m512 smallest_normal = _mm512_castsi512_ps(_mm512_set1_epi32((128 - f.bias) << 23));
    const __m512 exponent = _mm512_castsi512_ps(_mm512_set1_epi32(0x7F800000));
    __m512 scaled = _mm512_mul_ps(_mm512_castsi512_ps(magnitude), scale);
    *unfit |= _mm512_cmpgt_epu32_mask(_mm512_castps_si512(scaled), largest);
    __m512 power = _mm512_and_ps(_mm512_max_ps(scaled, smallest_normal), exponent);
    __m512i sum = _mm512_castps_si512(_mm512_fmadd_ps(power, _mm512_set1_ps((float)(1 << drop)), scaled));
    return _mm512_add_epi32(_mm512_srli_epi32(sum, drop), sum);
}
#define CODE_OF_ZERO(F) (((127 + 23 - (F).mantissa_bits - (F).bias + 1) << (F).mantissa_bits) & 0xFF)

/* 32 bfloat16 numbers, by pairs: even ones and odd ones are the halves of words. */
AVX512_INLINE __m512i encode_pairs(__m512i pairs, Format f, const float *scale, int per_element, __mmask16 *unfit) {
    __m512 even_scale = _mm512_set1_ps(*scale), odd_scale = even_scale;
    if (per_element) {
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        __m512 first = _mm512_loadu_ps(scale), second = _mm512_loadu_ps(scale + 16);
        even_scale = _mm512_permutex2var_ps(first, even, second);
        odd_scale = _mm512_permutex2var_ps(first, _mm512_add_epi32(even, _mm512_set1_epi32(1)), second);
    }
    __m512i magnitudes = _mm512_and_si512(pairs, _mm512_set1_epi16(0x7FFF));
    __m512i even_codes = encode_16(_mm512_slli_epi32(magnitudes, 16), even_scale, f, unfit);
    __m512i odd_codes = encode_16(_mm512_and_si512(magnitudes, _mm512_set1_epi32(-65536)), odd_scale, f, unfit);
    return take(even_codes, low_bytes.of_pairs, 0, odd_codes);
}

/* 32 float32 numbers. */
AVX512_INLINE __m512i encode_words(__m512i first, __m512i second, Format f, const float *scale, int per_element,
                                   __mmask16 *unfit) {
    const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
    __m512 first_scale = per_element ? _mm512_loadu_ps(scale) : _mm512_set1_ps(*scale);
    __m512 second_scale = per_element ? _mm512_loadu_ps(scale + 16) : first_scale;
    __m512i first_codes = encode_16(_mm512_and_si512(first, magnitude), first_scale, f, unfit);
    __m512i second_codes = encode_16(_mm512_and_si512(second, magnitude), second_scale, f, unfit);
    return take(first_codes, low_bytes.of_words, 0, second_codes);
}

/* Whether this has cast 64 numbers. */
AVX512_INLINE int cast_block(const char *hp, int hp_kind, Format f, const float *scale, int per_element,
                             uint8_t *codes) {
    const float *second_scale = per_element ? scale + 32 : scale;
    __mmask16 unfit = 0;
    __m512i magnitudes, signs;
    __m512i first = _mm512_loadu_si512(hp), second = _mm512_loadu_si512(hp + 64);
    if (hp_kind == BFLOAT16) {
        magnitudes = halves_of(encode_pairs(first, f, scale, per_element, &unfit),
                               encode_pairs(second, f, second_scale, per_element, &unfit));
        signs = take(first, low_bytes.of_halves, 1, second);
    } else {
        __m512i third = _mm512_loadu_si512(hp + 128), fourth = _mm512_loadu_si512(hp + 192);
        magnitudes = halves_of(encode_words(first, second, f, scale, per_element, &unfit),
                               encode_words(third, fourth, f, second_scale, per_element, &unfit));
        signs = halves_of(take(first, low_bytes.of_words, 3, second), take(third, low_bytes.of_words, 3, fourth));
    }
    magnitudes = _mm512_sub_epi8(magnitudes, _mm512_set1_epi8((char)CODE_OF_ZERO(f)));
    _mm512_storeu_si512(codes, with_signs(magnitudes, signs));
    return unfit == 0;
}

AVX512_INLINE void cast_blocks_body(const char *hp, int hp_kind, int float8, const float *scale, int per_element,
                                    int64_t n, uint8_t *codes) {
    const int64_t size = hp_kind == FLOAT32 ? 4 : 2;
    for (int64_t i = 0; i < n; i += BLOCK) {
        const float *scales = per_element ? scale + i : scale;
        if (!cast_block(hp + i * size, hp_kind, FLOAT8[float8], scales, per_element, codes + i))
            cast_run(hp + i * size, hp_kind, float8, scales, per_element, BLOCK, codes + i);
    }
}

/* cast_run, of whole blocks of float32 or bfloat16. */
AVX512 static void cast_blocks(const void *hp, int hp_kind, int float8, const float *scale, int per_element, int64_t n,
                               uint8_t *codes) {
#define CASE(H, F, P) case (H * 2 + F) * 2 + P: cast_blocks_body(hp, H, F, scale, P, n, codes); break;
#define CASES(H) CASE(H, E4M3, 0) CASE(H, E4M3, 1) CASE(H, E5M2, 0) CASE(H, E5M2, 1)
    switch ((hp_kind * 2 + float8) * 2 + per_element) { CASES(FLOAT32) CASES(BFLOAT16) }
#undef CASES
#undef CASE
}

/* ---- float8 -> bfloat16 ------------------------------------------------------------------------------------------*/

/* Numbers * 2^k where they are not 0: the exponent grows. */
AVX512_INLINE __m512i shifted(__m512i numbers, __m512i shift) {
    return _mm512_mask_add_epi16(numbers, _mm512_test_epi16_mask(numbers, _mm512_set1_epi16(0x7FFF)), numbers, shift);
}

/* The high and low bytes of 128 numbers, two vectors each. */
typedef struct { __m512i low[2], high[2]; } Lookup;

AVX512_INLINE Lookup lookup_of(const __m512i *table) {
    const uint8_t *bytes = low_bytes.of_halves;
    return (Lookup){{take(table[0], bytes, 0, table[1]), take(table[2], bytes, 0, table[3])},
                    {take(table[0], bytes, 1, table[1]), take(table[2], bytes, 1, table[3])}};
}

/* The numbers of 64 codes: of the lower and of the upper 8 codes of each 128-bit lane. */
AVX512_INLINE void look_up(Lookup numbers, __m512i codes, __m512i *of_lower, __m512i *of_upper) {
    __m512i lows = _mm512_permutex2var_epi8(numbers.low[0], codes, numbers.low[1]);
    __m512i highs = with_signs(_mm512_permutex2var_epi8(numbers.high[0], codes, numbers.high[1]), codes);
    *of_lower = _mm512_unpacklo_epi8(lows, highs), *of_upper = _mm512_unpackhi_epi8(lows, highs);
}

/* codes[i] * scale, looked up. `shifts`: one, or one an element if `per_element`. Blocks that hold NaN or inf go to
 * widen_run. */
AVX512_INLINE void widen_blocks_body(const uint8_t *codes, int float8, const float *scale, const int16_t *shifts,
                                     int per_element, int64_t n, uint16_t *out) {
    const uint8_t largest = (uint8_t)encode(FLOAT8[float8].max, FLOAT8[float8]);
    const __m512i first_qwords = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    __m512i table[4];
    for (int i = 0; i < 4; i++) {
        table[i] = _mm512_loadu_si512(bfloat16_of_code[float8] + 32 * i);
        if (!per_element) table[i] = shifted(table[i], _mm512_set1_epi16(*shifts));
    }
    const Lookup numbers = lookup_of(table);
    for (int64_t i = 0; i < n; i += BLOCK) {
        __m512i block = _mm512_loadu_si512(codes + i), first, second;
        if (_mm512_cmpgt_epu8_mask(_mm512_and_si512(block, _mm512_set1_epi8(0x7F)), _mm512_set1_epi8((char)largest))) {
            widen_run(codes + i, float8, BFLOAT16, per_element ? SCALE_PER_ELEMENT : ONE_SCALE,
                      per_element ? scale + i : scale, BLOCK, out + i);
            continue;
        }
        look_up(numbers, _mm512_permutexvar_epi64(first_qwords, block), &first, &second);
        if (per_element) {
            first = shifted(first, _mm512_loadu_si512(shifts + i));
            second = shifted(second, _mm512_loadu_si512(shifts + i + 32));
        }
        _mm512_storeu_si512(out + i, first);
        _mm512_storeu_si512(out + i + 32, second);
    }
}

/* widen_run into bfloat16, of whole blocks, by scales whose shifts are exact. */
AVX512 static void widen_blocks(const uint8_t *codes, int float8, const float *scale, const int16_t *shifts,
                                int per_element, int64_t n, uint16_t *out) {
#define CASE(F, P) case F * 2 + P: widen_blocks_body(codes, F, scale, shifts, P, n, out); break;
    switch (float8 * 2 + per_element) { CASE(E4M3, 0) CASE(E4M3, 1) CASE(E5M2, 0) CASE(E5M2, 1) }
#undef CASE
}

#else

static int has_avx512(void) { return 0; }
static void fill_tables(void) {}
static void cast_blocks(const void *hp, int hp_kind, int float8, const float *scale, int per_element, int64_t n,
                        uint8_t *codes) {
    cast_run(hp, hp_kind, float8, scale, per_element, n, codes);
}
static void widen_blocks(const uint8_t *codes, int float8, const float *scale, const int16_t *shifts, int per_element,
                         int64_t n, uint16_t *out) {
    (void)shifts;
    widen_run(codes, float8, BFLOAT16, per_element ? SCALE_PER_ELEMENT : ONE_SCALE, scale, n, out);
}

#endif

/* ---- whichever is faster here ------------------------------------------------------------------------------------*/

static int uses_avx512; /* set when the module is loaded */

/* cast_run. */
static void cast(const void *hp, int hp_kind, int float8, const float *scale, int per_element, int64_t n,
                 uint8_t *codes) {
    const int64_t in_blocks = uses_avx512 && hp_kind != FLOAT16 ? n / BLOCK * BLOCK : 0;
    if (in_blocks) cast_blocks(hp, hp_kind, float8, scale, per_element, in_blocks, codes);
    cast_run((const char *)hp + in_blocks * (hp_kind == FLOAT32 ? 4 : 2), hp_kind, float8,
             per_element ? scale + in_blocks : scale, per_element, n - in_blocks, codes + in_blocks);
}

/* observe_run: few enough elements that the second loop finds them in the cache. */
static float cast_and_see(const void *hp, int hp_kind, int float8, float scale, int64_t n, uint8_t *codes) {
    if (!uses_avx512 || hp_kind == FLOAT16) return observe_run(hp, hp_kind, float8, scale, n, codes);
    const uint32_t amax = amax_run(hp, hp_kind, n);
    cast(hp, hp_kind, float8, &scale, 0, n, codes);
    return float_of(hp_kind == FLOAT32 ? amax : amax << 16);
}

/* Whether all of [n] scales have shifts. */
static int shifts_of(const float *scale, int64_t n, int16_t *shifts) {
    int all = 1;
    for (int64_t i = 0; i < n; i++) all &= shift_of(scale[i], shifts + i);
    return all;
}

/* widen_run; `shifts` of the scales where they are one an element, or NULL. */
static void widen(const uint8_t *codes, int float8, int hp_kind, int scaling, const float *scale, const int16_t *shifts,
                  int64_t n, char *out) {
    const int per_element = scaling == SCALE_PER_ELEMENT;
    const float one = 1.0f, *scale_or_one = scaling == UNSCALED ? &one : scale;
    int16_t shift;
    int64_t in_blocks = 0;
    const int by_shifts = per_element ? shifts != NULL : shift_of(*scale_or_one, &shift);
    if (by_shifts && uses_avx512 && hp_kind == BFLOAT16 && n >= BLOCK) {
        in_blocks = n / BLOCK * BLOCK;
        widen_blocks(codes, float8, scale_or_one, per_element ? shifts : &shift, per_element, in_blocks,
                     (uint16_t *)out);
    }
    widen_run(codes + in_blocks, float8, hp_kind, scaling, per_element ? scale + in_blocks : scale, n - in_blocks,
              out + in_blocks * (hp_kind == FLOAT32 ? 4 : 2));
}

#endif
