/* Converts float8 to bfloat16 by table lookup on CPUs with AVX-512 VBMI (Intel since Ice Lake, AMD since Zen 4).
 *
 * The low bytes of a format's 128 non-negative values fill two vectors, and so do the high bytes. One instruction
 * indexes two vectors by 64 codes. NaN and inf are table entries too.
 */
#ifndef QUAVER_LOOKUP_H
#define QUAVER_LOOKUP_H

#include "runs.h"

static int uses_avx512; /* set when the module is loaded */

#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 12 : defined(__GNUC__) && __GNUC__ >= 10)
#define HAS_VECTORS 1
#include <immintrin.h>

#define AVX512_TARGET target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi")
#define AVX512 __attribute__((AVX512_TARGET))
#define AVX512_INLINE static inline __attribute__((always_inline, AVX512_TARGET))

static uint8_t low_bytes[2][128], high_bytes[2][128]; /* bytes of the values, by float8 kind and code without sign */

static int has_avx512(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

static void fill_tables(void) {
    for (int code = 0; code < 256; code++) {
        const uint16_t value = bfloat16_of_code(code % 128, FLOAT8[code / 128]);
        low_bytes[code / 128][code % 128] = (uint8_t)value;
        high_bytes[code / 128][code % 128] = (uint8_t)(value >> 8);
    }
}

typedef struct { __m512i low[2], high[2]; } Lookup;

AVX512_INLINE Lookup lookup_of(int float8) {
    const uint8_t *low = low_bytes[float8], *high = high_bytes[float8];
    return (Lookup){{_mm512_loadu_si512(low), _mm512_loadu_si512(low + 64)},
                    {_mm512_loadu_si512(high), _mm512_loadu_si512(high + 64)}};
}

/* The values of 64 codes: the lower and the upper 8 codes of each 128-bit lane. */
AVX512_INLINE void look_up(Lookup values, __m512i codes, __m512i *of_lower, __m512i *of_upper) {
    const __m512i sign = _mm512_set1_epi8((char)0x80);
    __m512i low = _mm512_permutex2var_epi8(values.low[0], codes, values.low[1]);
    __m512i high = _mm512_permutex2var_epi8(values.high[0], codes, values.high[1]);
    high = _mm512_ternarylogic_epi32(sign, codes, high, 0xCA); /* the sign bit of codes, the other bits of high */
    *of_lower = _mm512_unpacklo_epi8(low, high);
    *of_upper = _mm512_unpackhi_epi8(low, high);
}

/* decode_run for whole blocks of 64. */
AVX512 static void decode_blocks(const uint8_t *codes, int float8, int64_t n, uint16_t *values) {
    const __m512i first_lanes = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const Lookup lookup = lookup_of(float8);
    for (int64_t i = 0; i < n; i += 64) {
        __m512i first, second;
        look_up(lookup, _mm512_permutexvar_epi64(first_lanes, _mm512_loadu_si512(codes + i)), &first, &second);
        _mm512_storeu_si512(values + i, first);
        _mm512_storeu_si512(values + i + 32, second);
    }
}

#else
#define HAS_VECTORS 0

static int has_avx512(void) { return 0; }
static void fill_tables(void) {}
static void decode_blocks(const uint8_t *codes, int float8, int64_t n, uint16_t *values) {
    decode_run(codes, float8, n, values);
}

#endif

enum { WIDENED = 2048 }; /* values that stay in the L1 cache */

/* out[i] = codes[i] * scale in float32 or bfloat16; see scale_run. */
static void widen_run(const uint8_t *codes, int float8, int hp_kind, const float *scale, int per_element, int64_t n,
                      char *out) {
    uint16_t values[WIDENED];
    for (int64_t start = 0; start < n; start += WIDENED) {
        const int64_t count = least(WIDENED, n - start), in_blocks = uses_avx512 ? count / 64 * 64 : 0;
        if (in_blocks) decode_blocks(codes + start, float8, in_blocks, values);
        decode_run(codes + start + in_blocks, float8, count - in_blocks, values + in_blocks);
        scale_run(values, hp_kind, per_element ? scale + start : scale, per_element, count,
                  out + start * (hp_kind == FLOAT32 ? 4 : 2));
    }
}

#endif
