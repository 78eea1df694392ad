/* Converts one float8, bfloat16 or float16 code to and from float32. */
#ifndef QUAVER_ELEMENTS_H
#define QUAVER_ELEMENTS_H

#include <float.h>
#include <stdint.h>
#include <string.h>

#if FLT_EVAL_METHOD != 0
#error "float32 arithmetic must round to float32 (x87 does not); quaver runs without this extension"
#endif

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

/* One binary for every x86-64: the loader picks a clone. Needs ifunc (glibc) and a compiler with x86-64 levels. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

enum { FLOAT32, BFLOAT16, FLOAT16 };  /* hp kinds */
enum { E4M3, E5M2 };                  /* float8 kinds */

/* `ieee`: the top exponent holds inf and NaN; otherwise only the top code is NaN. */
typedef struct {
    int exponent_bits, mantissa_bits, bias, ieee;
    float max, largest_quant_scale, saturates_above;
} Format;
static const Format HALF = {5, 10, 15, 1, 65504.0f, 0.0f, 0.0f};
static const Format FLOAT8[] = {
    [E4M3] = {4, 3, 7, 0, 448.0f, (float)(448.0 / 1e-12), 464.0f},
    [E5M2] = {5, 2, 15, 1, 57344.0f, (float)(57344.0 / 1e-12), 61440.0f},
};

INLINE uint32_t bits_of(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }
INLINE float float_of(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* A code of 8 or 16 bits -> float32, exactly; NaN and inf kept.
 * A subnormal is read as 2^(1-bias) * (1 + fraction), a normal float32; then 2^(1-bias) is subtracted. */
INLINE float decode(uint32_t code, Format f) {
    const int width = f.exponent_bits + f.mantissa_bits;
    const uint32_t one = 1u << 23, rebias = (uint32_t)(127 - f.bias) << 23;
    const uint32_t top = f.ieee ? ((1u << f.exponent_bits) - 1) << 23 : ((1u << width) - 1) << (23 - f.mantissa_bits);
    uint32_t shifted = code << (31 - width);
    uint32_t rest = (shifted & 0x7FFFFFFFu) >> (8 - f.exponent_bits);
    uint32_t base = rest < one ? rebias + one : rebias, lifted_by = rest < one ? rebias + one : 0;
    uint32_t special = rest >= top ? (f.ieee ? 0x7F800000u : 0x7FC00000u) : 0;
    float magnitude = float_of(rest + base) - float_of(lifted_by);
    return float_of(bits_of(magnitude) | special | (shifted & 0x80000000u));
}

/* A float8 code -> bfloat16, which holds every float8 value: the upper half of the float32. */
INLINE uint16_t bfloat16_of_code(uint32_t code, Format f) { return (uint16_t)(bits_of(decode(code, f)) >> 16); }

/* RNE8(clamp(value, -max, max)): ties to even, subnormals kept; NaN -> 0x7F or 0xFF by its sign.
 *
 * Let 2^e be the largest power of two up to |value|, but at least the smallest normal. The code is e's field plus the
 * rounded significand |value| / 2^(e - mantissa_bits), which is below 2^mantissa_bits for a subnormal. Adding
 * 2^(e + 23 - mantissa_bits) to |value| rounds it: the low bits of the sum are the significand. Only the low byte of a
 * code is kept, so higher bits need no mask. `offset` is the part of e's bias that reaches this byte, and is added with
 * the power. It is even, so ties still go to even. */
INLINE uint8_t encode(float value, Format f) {
    const int drop = 23 - f.mantissa_bits;
    const uint32_t smallest_normal = (uint32_t)(128 - f.bias) << 23;
    const uint32_t offset = (0u - (smallest_normal >> drop)) & 0xFF;
    uint32_t magnitude = bits_of(value) & 0x7FFFFFFFu;
    uint32_t nan = magnitude > 0x7F800000u ? 0x7F000000u : 0;
    magnitude = magnitude < bits_of(f.max) ? magnitude : bits_of(f.max);
    uint32_t power = (magnitude > smallest_normal ? magnitude : smallest_normal) & 0x7F800000u;
    uint32_t sum = bits_of(float_of(magnitude) + float_of(power + ((uint32_t)drop << 23) + offset));
    return (uint8_t)(((sum + (power >> drop)) << 24 | nan | (bits_of(value) & 0x80000000u)) >> 24);
}

/* hp[i] -> float32, exactly. It uses memcpy, because amaxes are written as integers. */
INLINE float load(const void *hp, int hp_kind, int64_t i) {
    float value;
    uint16_t code;
    if (hp_kind == FLOAT32) {
        memcpy(&value, (const float *)hp + i, 4);
        return value;
    }
    memcpy(&code, (const uint16_t *)hp + i, 2);
    return hp_kind == BFLOAT16 ? float_of((uint32_t)code << 16) : decode(code, HALF);
}

/* float32 -> bfloat16, ties to even; NaN stays NaN. */
INLINE uint16_t bfloat16_of(float value) {
    uint32_t bits = bits_of(value);
    return value == value ? (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) : 0x7FC0;
}

#endif
