/* Operations on a run of n contiguous elements. `scale` is one number, or one per element if `per_element`.
 *
 * Loops have no branches and no calls, so that compilers vectorize them. The hp kind is a constant in each loop:
 * BY_KIND selects one of three always-inlined bodies, once per run.
 */
#ifndef QUAVER_RUNS_H
#define QUAVER_RUNS_H

#include "elements.h"

#define BY_KIND(BODY, HP_KIND, ...) \
    switch (HP_KIND) { \
    case FLOAT32: BODY(FLOAT32, __VA_ARGS__); break; \
    case BFLOAT16: BODY(BFLOAT16, __VA_ARGS__); break; \
    default: BODY(FLOAT16, __VA_ARGS__); \
    }

/* Replaces inf by NaN, because a clamp would hide it: hp - hp is NaN for inf, else 0. */
INLINE float nan_for_inf(float hp) { return hp - (hp - hp); }

INLINE void cast_body(int hp_kind, const void *hp, Format f, const float *scale, int per_element, int is_own_scale,
                      int64_t n, uint8_t *restrict codes) {
    const float one_scale = *scale;
    for (int64_t i = 0; i < n; i++) {
        const float value = load(hp, hp_kind, i);
        codes[i] = encode((is_own_scale ? value : nan_for_inf(value)) * (per_element ? scale[i] : one_scale), f);
    }
}

/* codes[i] = RNE8(clamp(RN32(hp[i] * scale), -max, max)), NaN for an infinite hp[i]. If `is_own_scale`, the scale was
 * computed from the amax of its elements. An inf then has a scale of 0 and a product of NaN, so no check is needed. */
CLONES static void cast_run(const void *hp, int hp_kind, int float8, const float *scale, int per_element,
                            int is_own_scale, int64_t n, uint8_t *codes) {
    const Format f = FLOAT8[float8];
    if (n <= 0) return;
    if (per_element && is_own_scale) BY_KIND(cast_body, hp_kind, hp, f, scale, 1, 1, n, codes)
    else if (per_element) BY_KIND(cast_body, hp_kind, hp, f, scale, 1, 0, n, codes)
    else if (is_own_scale) BY_KIND(cast_body, hp_kind, hp, f, scale, 0, 1, n, codes)
    else BY_KIND(cast_body, hp_kind, hp, f, scale, 0, 0, n, codes)
}

INLINE void divide_body(int hp_kind, const void *hp, Format f, const float *scale, int per_element, int64_t n,
                        uint8_t *restrict codes) {
    const float one_scale = *scale;
    for (int64_t i = 0; i < n; i++)
        codes[i] = encode(nan_for_inf(load(hp, hp_kind, i)) / (per_element ? scale[i] : one_scale), f);
}

/* codes[i] = RNE8(clamp(RN32(hp[i] / scale), -max, max)), NaN for an infinite hp[i]. */
CLONES static void divide_run(const void *hp, int hp_kind, int float8, const float *scale, int per_element, int64_t n,
                              uint8_t *codes) {
    if (n <= 0) return;
    if (per_element) BY_KIND(divide_body, hp_kind, hp, FLOAT8[float8], scale, 1, n, codes)
    else BY_KIND(divide_body, hp_kind, hp, FLOAT8[float8], scale, 0, n, codes)
}

INLINE void observed_body(int hp_kind, const void *hp, Format f, float scale, int32_t n, uint8_t *restrict codes,
                          int32_t *saturated) {
    for (int32_t i = 0; i < n; i++) {
        const float value = nan_for_inf(load(hp, hp_kind, i)) * scale;
        const uint32_t magnitude = bits_of(value) & 0x7FFFFFFFu;
        *saturated += magnitude > bits_of(f.saturates_above) && magnitude <= 0x7F800000u;
        codes[i] = encode(value, f);
    }
}

/* cast_run with one scale; returns the number of saturated elements, which clamping changes more than rounding. */
CLONES static int32_t counting_cast_run(const void *hp, int hp_kind, int float8, float scale, int32_t n,
                                        uint8_t *codes) {
    int32_t saturated = 0;
    BY_KIND(observed_body, hp_kind, hp, FLOAT8[float8], scale, n, codes, &saturated)
    return saturated;
}

/* Typed by width: compilers do not vectorize a maximum of values that are promoted to int. */
INLINE uint16_t larger16(uint16_t a, uint16_t b) { return a > b ? a : b; }
INLINE uint32_t larger32(uint32_t a, uint32_t b) { return a > b ? a : b; }

/* amax = max |hp[i]|, as bits of the hp kind; 0 for an empty run. */
CLONES static void amax_run(const void *hp, int hp_kind, int64_t n, void *amax) {
    const uint16_t *halves = hp;
    const uint32_t *words = hp;
    uint16_t half = 0;
    uint32_t word = 0;
    if (hp_kind == FLOAT32) for (int64_t i = 0; i < n; i++) word = larger32(words[i] & 0x7FFFFFFF, word);
    else for (int64_t i = 0; i < n; i++) half = larger16(halves[i] & 0x7FFF, half);
    if (hp_kind == FLOAT32) memcpy(amax, &word, 4);
    else memcpy(amax, &half, 2);
}

/* amax[i] = max(amax[i], |hp[i]|), as bits of the hp kind. */
CLONES static void amax_each(const void *hp, int hp_kind, int64_t n, void *amax) {
    const uint16_t *halves = hp;
    const uint32_t *words = hp;
    uint16_t *restrict half = amax;
    uint32_t *restrict word = amax;
    if (hp_kind == FLOAT32) for (int64_t i = 0; i < n; i++) word[i] = larger32(words[i] & 0x7FFFFFFF, word[i]);
    else for (int64_t i = 0; i < n; i++) half[i] = larger16(halves[i] & 0x7FFF, half[i]);
}

/* quant = RN32(max / amax), capped, rounded down to 2^k on request; dequant = RN32(1 / quant). NaN -> NaN. */
CLONES static void scales_run(const void *amax, int hp_kind, int float8, int power_of_2, int64_t n, float *quant,
                              float *dequant) {
    const Format f = FLOAT8[float8];
    for (int64_t i = 0; i < n; i++) {
        float scale = f.max / load(amax, hp_kind, i);
        scale = scale > f.largest_quant_scale ? f.largest_quant_scale : scale;
        if (power_of_2 && scale == scale) scale = float_of(bits_of(scale) & 0xFF800000u);
        quant[i] = scale;
        dequant[i] = 1.0f / scale;
    }
}

/* out[i] = scale[i / length] */
CLONES static void repeat_run(const float *scale, int64_t length, int64_t n, float *restrict out) {
    const int64_t whole = n / length;
    if (length == 32) for (int64_t i = 0; i < whole; i++) for (int64_t j = 0; j < 32; j++) out[i * 32 + j] = scale[i];
    else for (int64_t i = 0; i < whole; i++) for (int64_t j = 0; j < length; j++) out[i * length + j] = scale[i];
    for (int64_t i = whole * length; i < n; i++) out[i] = scale[whole];
}

/* values[i] = codes[i] in bfloat16. */
CLONES static void decode_run(const uint8_t *codes, int float8, int64_t n, uint16_t *restrict values) {
    if (float8 == E4M3) for (int64_t i = 0; i < n; i++) values[i] = bfloat16_of_code(codes[i], FLOAT8[E4M3]);
    else for (int64_t i = 0; i < n; i++) values[i] = bfloat16_of_code(codes[i], FLOAT8[E5M2]);
}

/* out[i] = values[i] * scale, values in bfloat16, out in float32 or bfloat16. Exact in bfloat16 if scale is 2^k with
 * k >= -110. */
CLONES static void scale_run(const uint16_t *values, int hp_kind, const float *scale, int per_element, int64_t n,
                             void *restrict out) {
    const float one_scale = *scale;
    for (int64_t i = 0; i < n; i++) {
        float value = load(values, BFLOAT16, i) * (per_element ? scale[i] : one_scale);
        if (hp_kind == FLOAT32) ((float *)out)[i] = value;
        else ((uint16_t *)out)[i] = (uint16_t)(bits_of(value) >> 16);
    }
}

#endif
