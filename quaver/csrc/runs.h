/* A run of elements: n of them, contiguous; `scale` is one number, or one an element if `per_element`. */
#ifndef QUAVER_RUNS_H
#define QUAVER_RUNS_H

#include "elements.h"

/* One binary for every x86-64: the loader picks a clone. Needs ifunc (glibc) and a compiler that knows the levels. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

INLINE void cast_body(const void *hp, int hp_kind, Format f, const float *scale, int per_element, int64_t n,
                      uint8_t *restrict codes) {
    const float one_scale = *scale;
    for (int64_t i = 0; i < n; i++) codes[i] = encode(load(hp, hp_kind, i) * (per_element ? scale[i] : one_scale), f);
}

/* codes[i] = RNE8(clamp(RN32(hp[i] * scale), -max, max)). */
CLONES static void cast_run(const void *hp, int hp_kind, int float8, const float *scale, int per_element, int64_t n,
                            uint8_t *codes) {
#define CASE(H, F, P) case (H * 2 + F) * 2 + P: cast_body(hp, H, FLOAT8[F], scale, P, n, codes); break;
#define CASES(H) CASE(H, E4M3, 0) CASE(H, E4M3, 1) CASE(H, E5M2, 0) CASE(H, E5M2, 1)
    if (n > 0) switch ((hp_kind * 2 + float8) * 2 + per_element) { CASES(FLOAT32) CASES(BFLOAT16) CASES(FLOAT16) }
#undef CASES
#undef CASE
}

/* In their own width: promoted to int, they would not become a vector's maximum. */
INLINE uint16_t larger16(uint16_t a, uint16_t b) { return a > b ? a : b; }
INLINE uint32_t larger32(uint32_t a, uint32_t b) { return a > b ? a : b; }

INLINE float observe_body(const void *hp, int hp_kind, Format f, float scale, int64_t n, uint8_t *restrict codes) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        float value = load(hp, hp_kind, i);
        largest = larger32(bits_of(value) & 0x7FFFFFFFu, largest);
        codes[i] = encode(value * scale, f);
    }
    return float_of(largest);
}

/* As cast_run with one scale; returns the amax of hp. In one loop, so that the cast runs while memory is read. */
CLONES static float observe_run(const void *hp, int hp_kind, int float8, float scale, int64_t n, uint8_t *codes) {
#define CASE(H, F) case H * 2 + F: return observe_body(hp, H, FLOAT8[F], scale, n, codes);
#define CASES(H) CASE(H, E4M3) CASE(H, E5M2)
    if (n > 0) switch (hp_kind * 2 + float8) { CASES(FLOAT32) CASES(BFLOAT16) CASES(FLOAT16) }
#undef CASES
#undef CASE
    return 0.0f;
}

INLINE int64_t overflow_body(const void *hp, int hp_kind, Format f, float scale, int64_t n, uint8_t *restrict codes) {
    int64_t saturated = 0;
    for (int64_t i = 0; i < n; i++) {
        float value = load(hp, hp_kind, i);
        uint32_t nan = (bits_of(value) & 0x7FFFFFFFu) == 0x7F800000u ? 0x7FC00000u : 0;
        float scaled = float_of(bits_of(value * scale) | nan);
        uint32_t magnitude = bits_of(scaled) & 0x7FFFFFFFu;
        saturated += magnitude > bits_of(f.saturates_above) && magnitude <= 0x7F800000u;
        codes[i] = encode(scaled, f);
    }
    return saturated;
}

/* As cast_run with one scale, but an infinite hp[i] becomes NaN; returns how many elements the clamp takes more from than
 * rounding. For what does not fit its scale. */
CLONES static int64_t overflow_run(const void *hp, int hp_kind, int float8, float scale, int64_t n, uint8_t *codes) {
#define CASE(H, F) case H * 2 + F: return overflow_body(hp, H, FLOAT8[F], scale, n, codes);
#define CASES(H) CASE(H, E4M3) CASE(H, E5M2)
    if (n > 0) switch (hp_kind * 2 + float8) { CASES(FLOAT32) CASES(BFLOAT16) CASES(FLOAT16) }
#undef CASES
#undef CASE
    return 0;
}

enum { UNSCALED, ONE_SCALE, SCALE_PER_ELEMENT };

INLINE void widen_body(const uint8_t *codes, Format f, int hp_kind, int scaling, const float *scale, int64_t n,
                       void *restrict out) {
    const float one_scale = scaling == UNSCALED ? 1.0f : *scale;
    for (int64_t i = 0; i < n; i++) {
        float value = decode(codes[i], f);
        if (scaling != UNSCALED) value *= scaling == ONE_SCALE ? one_scale : scale[i];
        if (hp_kind == FLOAT32) ((float *)out)[i] = value;
        else ((uint16_t *)out)[i] = (uint16_t)(bits_of(value) >> 16);
    }
}

/* out[i] = codes[i] * scale in float32 or bfloat16. Exact in bfloat16 if scale is 2^k, k >= -110. */
CLONES static void widen_run(const uint8_t *codes, int float8, int hp_kind, int scaling, const float *scale, int64_t n,
                             void *out) {
#define CASE(F, H, S) case (F * 2 + H) * 3 + S: widen_body(codes, FLOAT8[F], H, S, scale, n, out); break;
#define CASES(F, H) CASE(F, H, UNSCALED) CASE(F, H, ONE_SCALE) CASE(F, H, SCALE_PER_ELEMENT)
    if (n > 0) switch ((float8 * 2 + hp_kind) * 3 + scaling) {
        CASES(E4M3, FLOAT32) CASES(E4M3, BFLOAT16) CASES(E5M2, FLOAT32) CASES(E5M2, BFLOAT16)
    }
#undef CASES
#undef CASE
}

/* The bits of max |hp[i]|; 0 for an empty run. */
CLONES static uint32_t amax_run(const void *hp, int hp_kind, int64_t n) {
    const uint16_t *halves = hp;
    const uint32_t *words = hp;
    uint16_t half = 0;
    uint32_t word = 0;
    if (hp_kind == FLOAT32) {
        for (int64_t i = 0; i < n; i++) word = larger32(words[i] & 0x7FFFFFFF, word);
        return word;
    }
    for (int64_t i = 0; i < n; i++) half = larger16(halves[i] & 0x7FFF, half);
    return half;
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

/* quant[i], dequant[i] from amax[i] of the hp kind. */
CLONES static void scales_run(const void *amax, int hp_kind, int float8, int power_of_2, int64_t n, float *quant,
                              float *dequant) {
    for (int64_t i = 0; i < n; i++) {
        Scales s = scales_of(load(amax, hp_kind, i), FLOAT8[float8], power_of_2);
        quant[i] = s.quant, dequant[i] = s.dequant;
    }
}

#endif
