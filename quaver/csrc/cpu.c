/* quaver._cpu: the float8 casts of eager code on a CPU, one call each, and matmuls too small for a library's set-up.
 *
 * quaver/scaling.py says what is computed, and is matched bit for bit; quaver/kernels/cpu.py is the only caller.
 * Every matrix is [rows, columns], contiguous. `dim` is the one that an amax reduces: NONE (-1) for one amax or scale,
 * 1 for one a row [rows, 1], 0 for one a column [1, columns]. Addresses arrive as integers, and are trusted.
 *
 * Why it is written so:
 *   - Inner loops have no branches and no calls, so that compilers vectorise them. Kinds are constants there: each
 *     CLONES function picks an always-inlined body by switch, once per run of elements.
 *   - Magnitudes of IEEE numbers order like their bits, NaNs on top, so an amax is a maximum of integers.
 *   - Floating point means what IEEE 754 says: no -ffast-math, no contraction, no excess precision.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
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

/* One binary for every x86-64: the loader picks a clone. Needs ifunc (glibc) and a compiler that knows the levels. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

enum { FLOAT32, BFLOAT16, FLOAT16 };  /* hp kinds */
enum { E4M3, E5M2 };                  /* float8 kinds */
enum { NONE = -1 };                   /* dim */
enum { RELEASE_GIL_FROM = 32768 };    /* elements; some microseconds of work */

/* `ieee`: the top exponent holds inf and NaN; else only the top code is a NaN. */
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

/* ---- one element -------------------------------------------------------------------------------------------------*/

/* A code of 8 or 16 bits -> float32, exactly; NaN and inf kept.
 * A subnormal is taken for 2^(1-bias) * (1 + fraction), a normal float32, and loses the 2^(1-bias) again. */
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

/* RNE8(clamp(value, -max, max)): ties to even, subnormals kept; NaN -> 0x7F or 0xFF by its sign.
 *
 * With 2^e the power of two at or below |value|, at least the smallest normal, the code is e's field plus the
 * significand |value| / 2^(e - mantissa_bits), rounded: 2^mantissa_bits or more for a normal, less for a subnormal.
 * Adding 2^(e + 23 - mantissa_bits) to |value| rounds it there: the sum's low bits hold the significand. Only the low
 * byte of a code is kept, so whatever lies above it need not be taken away; `offset`, the part of e's bias that reaches
 * into that byte, rides in the low bits of the addend. It is even, so ties still go to even. */
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

/* hp[i] -> float32, exactly. By memcpy, because amaxes were written as integers. */
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

typedef struct { float quant, dequant; } Scales;

/* quant = RN32(max / amax), capped, rounded down to 2^k on request; dequant = RN32(1 / quant). NaN -> NaN. */
INLINE Scales scales_of(float amax, Format f, int power_of_2) {
    float quant = f.max / amax;
    quant = quant > f.largest_quant_scale ? f.largest_quant_scale : quant;
    if (power_of_2 && quant == quant) quant = float_of(bits_of(quant) & 0xFF800000u);
    return (Scales){quant, 1.0f / quant};
}

/* ---- a run of elements: n of them, contiguous; `scale` is one number, or one an element if `per_element` ----------*/

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

/* ---- a matrix, in blocks of rows (of elements, where the dim does not matter), one thread each --------------------*/

typedef struct { float amax; int64_t saturated; } Observed;

typedef struct {
    char *hp;               /* [rows, columns] of hp_kind; what widen writes */
    uint8_t *codes;         /* [rows, columns] of float8; what widen reads */
    char *amax;             /* of hp_kind; () or [1, columns]; while casting only */
    float *quant, *dequant; /* (), [rows, 1] or [1, columns] */
    Observed *observed;     /* one a block; while casting with a kept scale only */
    int64_t rows, columns;
    int hp_kind, float8, dim, power_of_2, threads;
} Job;

enum { MOST_THREADS = 64, CACHED = 8192 /* elements that stay in the first cache between two runs over them */ };

static int64_t elements_read;  /* of hp matrices, since the module was loaded; read by tests. Under the GIL or approximate. */

INLINE int64_t hp_size(const Job *job) { return job->hp_kind == FLOAT32 ? 4 : 2; }
INLINE char *hp_row(const Job *job, int64_t row) { return job->hp + row * job->columns * hp_size(job); }

INLINE void store_amax(const Job *job, void *amax, int64_t i, uint32_t bits) {
    uint16_t low = (uint16_t)bits;
    if (job->hp_kind == FLOAT32) memcpy((uint32_t *)amax + i, &bits, 4);
    else memcpy((uint16_t *)amax + i, &low, 2);
}

/* work(job, block, first, last) for every block of 0..n; blocks differ in nothing that they write. */
static void in_blocks(void (*work)(const Job *, int, int64_t, int64_t), const Job *job, int64_t n) {
    if (job->threads == 1) { work(job, 0, 0, n); return; }
#pragma omp parallel for num_threads(job->threads) schedule(static, 1)
    for (int block = 0; block < job->threads; block++)
        work(job, block, n * block / job->threads, n * (block + 1) / job->threads);
}

static void amax_of_elements(const Job *job, int block, int64_t first, int64_t last) {
    uint32_t bits = amax_run(job->hp + first * hp_size(job), job->hp_kind, last - first);
    store_amax(job, job->amax, block, bits);
}

static void amax_of_columns(const Job *job, int block, int64_t first, int64_t last) {
    char *amax = job->amax + block * job->columns * hp_size(job);
    memset(amax, 0, job->columns * hp_size(job));
    for (int64_t row = first; row < last; row++) amax_each(hp_row(job, row), job->hp_kind, job->columns, amax);
}

/* Reads memory once: a few elements at a time, which are cast again from the cache, and counted, if they overflow. */
static void cast_and_observe_elements(const Job *job, int block, int64_t first, int64_t last) {
    float largest = 0.0f;
    int64_t saturated = 0;
    for (int64_t start = first; start < last; start += CACHED) {
        const char *hp = job->hp + start * hp_size(job);
        uint8_t *codes = job->codes + start;
        int64_t n = last - start < CACHED ? last - start : CACHED;
        float amax = observe_run(hp, job->hp_kind, job->float8, *job->quant, n, codes);
        if (!(amax * *job->quant <= FLOAT8[job->float8].saturates_above && amax <= FLT_MAX))
            saturated += overflow_run(hp, job->hp_kind, job->float8, *job->quant, n, codes);
        if (bits_of(amax) > bits_of(largest)) largest = amax;
    }
    job->observed[block].amax = largest, job->observed[block].saturated = saturated;
}

/* Fills job->amax, tensorwise or by columns: each thread has a result of its own first. 0, or -1 without memory. */
static int fill_amax(const Job *job) {
    elements_read += job->rows * job->columns;
    const int64_t length = job->dim == NONE ? 1 : job->columns;
    void (*work)(const Job *, int, int64_t, int64_t) = job->dim == NONE ? amax_of_elements : amax_of_columns;
    const int64_t n = job->dim == NONE ? job->rows * job->columns : job->rows;
    if (job->threads == 1) { in_blocks(work, job, n); return 0; }
    Job partial = *job;
    partial.amax = PyMem_RawMalloc(length * hp_size(job) * job->threads + 1);
    if (partial.amax == NULL) return -1;
    in_blocks(work, &partial, n);
    memset(job->amax, 0, length * hp_size(job));
    for (int block = 0; block < job->threads; block++)
        amax_each(partial.amax + block * length * hp_size(job), job->hp_kind, length, job->amax);
    PyMem_RawFree(partial.amax);
    return 0;
}

static void cast_elements(const Job *job, int block, int64_t first, int64_t last) {
    (void)block;
    const char *hp = job->hp + first * hp_size(job);
    cast_run(hp, job->hp_kind, job->float8, job->quant, 0, last - first, job->codes + first);
}

static void cast_rows(const Job *job, int block, int64_t first, int64_t last) {
    (void)block;
    for (int64_t row = first; row < last; row++)
        cast_run(hp_row(job, row), job->hp_kind, job->float8, job->dim == 1 ? job->quant + row : job->quant,
                 job->dim == 0, job->columns, job->codes + row * job->columns);
}

static void cast_matrix(const Job *job) {
    elements_read += job->rows * job->columns;
    if (job->dim == NONE) in_blocks(cast_elements, job, job->rows * job->columns);
    else in_blocks(cast_rows, job, job->rows);
}

/* amax, scales and cast of one row at a time, while it is in the cache. */
static void dynamic_cast_rows(const Job *job, int block, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
        uint32_t amax = 0;
        store_amax(job, &amax, 0, amax_run(hp_row(job, row), job->hp_kind, job->columns));
        scales_run(&amax, job->hp_kind, job->float8, job->power_of_2, 1, job->quant + row, job->dequant + row);
        cast_rows(job, block, row, row + 1);
    }
}

static int dynamic_cast_matrix(const Job *job) {
    if (job->dim == 1) {
        elements_read += job->rows * job->columns;  /* the second time from the cache */
        in_blocks(dynamic_cast_rows, job, job->rows);
        return 0;
    }
    const int64_t length = job->dim == NONE ? 1 : job->columns;
    Job with_amax = *job;
    with_amax.amax = PyMem_RawMalloc(length * hp_size(job) + 1);
    int failed = with_amax.amax == NULL ? -1 : fill_amax(&with_amax);
    if (!failed) {
        scales_run(with_amax.amax, job->hp_kind, job->float8, job->power_of_2, length, job->quant, job->dequant);
        cast_matrix(job);
    }
    PyMem_RawFree(with_amax.amax);
    return failed;
}

/* The amax in `observed` [2] and the count of saturated elements become the larger of what they are and what this sees. */
static int cast_and_observe_matrix(const Job *job, float kept_quant, float *observed) {
    if (kept_quant > 0) {
        *job->quant = kept_quant, *job->dequant = 1.0f / kept_quant;
    } else {
        uint32_t amax = 0;
        Job of_amax = *job;
        of_amax.amax = (char *)&amax;
        if (fill_amax(&of_amax)) return -1;
        scales_run(&amax, job->hp_kind, job->float8, job->power_of_2, 1, job->quant, job->dequant);
    }
    Observed seen[MOST_THREADS];
    Job observing = *job;
    observing.observed = seen;
    elements_read += job->rows * job->columns;
    in_blocks(cast_and_observe_elements, &observing, job->rows * job->columns);
    int64_t saturated = 0;
    for (int block = 0; block < job->threads; block++) {
        float amax = seen[block].amax;
        saturated += seen[block].saturated;
        /* NaN compares with nothing, and stays once it is there; -1 stands for a tensor that has not been seen. */
        if (!(amax <= observed[0]) && observed[0] == observed[0]) observed[0] = amax;
    }
    if ((float)saturated > observed[1]) observed[1] = (float)saturated;
    return 0;
}

static void widen_rows(const Job *job, int block, int64_t first, int64_t last) {
    (void)block;
    for (int64_t row = first; row < last; row++)
        widen_run(job->codes + row * job->columns, job->float8, job->hp_kind,
                  job->dim == 0 ? SCALE_PER_ELEMENT : ONE_SCALE, job->dim == 1 ? job->dequant + row : job->dequant,
                  job->columns, hp_row(job, row));
}

static void widen_elements(const Job *job, int block, int64_t first, int64_t last) {
    (void)block;
    widen_run(job->codes + first, job->float8, job->hp_kind, job->dequant == NULL ? UNSCALED : ONE_SCALE, job->dequant,
              last - first, job->hp + first * hp_size(job));
}

static int widen_matrix(const Job *job) {
    if (job->dim == NONE) in_blocks(widen_elements, job, job->rows * job->columns);
    else in_blocks(widen_rows, job, job->rows);
    return 0;
}

static int cast_with_scale_matrix(const Job *job) { cast_matrix(job); return 0; }

/* ---- small matmuls ------------------------------------------------------------------------------------------------*/

static float VALUE[2][256];  /* of each code of each format; filled when the module is loaded */

typedef struct { const uint8_t *codes; int float8; int64_t row_stride, column_stride; const float *scale; } Operand;

/* out[j] = sum over p of a[p] * b[p, j] in float32, p ascending. a [k], b [k, n]. */
INLINE void sum_of_rows(const float *a, const float *b, int64_t k, int64_t n, float *restrict out) {
    memset(out, 0, n * sizeof(float));
    for (int64_t p = 0; p < k; p++)
        for (int64_t j = 0; j < n; j++) out[j] += a[p] * b[p * n + j];
}

/* float32 -> bfloat16, ties to even; NaN stays NaN. */
INLINE uint16_t bfloat16_of(float value) {
    uint32_t bits = bits_of(value);
    return value == value ? (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) : 0x7FC0;
}

/* out [m, n] = RN((a @ b) * a.scale * b.scale), a [m, k], b [k, n], any strides; a scale is one number, or one per row of
 * a or column of b. `work` has room for k * n + k + n numbers. */
CLONES static void small_matmul(Operand a, int rowwise_a, Operand b, int rowwise_b, int64_t m, int64_t k, int64_t n,
                                int hp_kind, float *work, char *out) {
    float *b_hp = work, *a_row = work + k * n, *sums = a_row + k;
    const float *a_value = VALUE[a.float8], *b_value = VALUE[b.float8];
    for (int64_t p = 0; p < k; p++)
        for (int64_t j = 0; j < n; j++)
            b_hp[p * n + j] = b_value[b.codes[p * b.row_stride + j * b.column_stride]];
    for (int64_t i = 0; i < m; i++) {
        for (int64_t p = 0; p < k; p++)
            a_row[p] = a_value[a.codes[i * a.row_stride + p * a.column_stride]];
        sum_of_rows(a_row, b_hp, k, n, sums);
        for (int64_t j = 0; j < n; j++) {
            float value = sums[j] * a.scale[rowwise_a ? i : 0] * b.scale[rowwise_b ? j : 0];
            if (hp_kind == FLOAT32) ((float *)out)[i * n + j] = value;
            else ((uint16_t *)out)[i * n + j] = bfloat16_of(value);
        }
    }
}

/* ---- Python ------------------------------------------------------------------------------------------------------*/

static int read_integers(PyObject *const *args, Py_ssize_t count, int64_t *values, int expected) {
    if (count != expected) {
        PyErr_Format(PyExc_TypeError, "expected %d integers, got %zd", expected, count);
        return 0;
    }
    for (int i = 0; i < expected; i++) {
        values[i] = PyLong_AsLongLong(args[i]);
        if (values[i] == -1 && PyErr_Occurred()) return 0;
    }
    return 1;
}

/* These take the same eleven integers: hp, codes, quant_scale, dequant_scale (addresses, 0 for what is not used), rows,
 * columns, hp kind, float8 kind, dim, power_of_2, threads. They fill what they compute. */
static PyObject *call(int (*matrix)(const Job *), PyObject *const *args, Py_ssize_t count) {
    int64_t v[11];
    if (!read_integers(args, count, v, 11)) return NULL;
    Job job = {
        .hp = (char *)(intptr_t)v[0], .codes = (uint8_t *)(intptr_t)v[1], .quant = (float *)(intptr_t)v[2],
        .dequant = (float *)(intptr_t)v[3], .rows = v[4], .columns = v[5], .hp_kind = (int)v[6], .float8 = (int)v[7],
        .dim = (int)v[8], .power_of_2 = (int)v[9],
        .threads = v[10] < 1 ? 1 : v[10] > MOST_THREADS ? MOST_THREADS : (int)v[10],
    };
    int failed;
    if (job.rows * job.columns < RELEASE_GIL_FROM) {
        failed = matrix(&job);
    } else {
        Py_BEGIN_ALLOW_THREADS
        failed = matrix(&job);
        Py_END_ALLOW_THREADS
    }
    if (failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

#define ENTRY(NAME, MATRIX) \
    static PyObject *NAME(PyObject *self, PyObject *const *args, Py_ssize_t count) { \
        (void)self; \
        return call(MATRIX, args, count); \
    }
ENTRY(dynamic_cast, dynamic_cast_matrix)
ENTRY(cast_with_scale, cast_with_scale_matrix)
ENTRY(widen, widen_matrix)

/* Twelve integers: hp, codes, kept quant_scale, quant_scale, dequant_scale, observed [amax, saturated] (addresses), rows,
 * columns, hp kind, float8 kind, power_of_2, threads. */
static PyObject *cast_and_observe(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    int64_t v[12];
    if (!read_integers(args, count, v, 12)) return NULL;
    Job job = {
        .hp = (char *)(intptr_t)v[0], .codes = (uint8_t *)(intptr_t)v[1], .quant = (float *)(intptr_t)v[3],
        .dequant = (float *)(intptr_t)v[4], .rows = v[6], .columns = v[7], .hp_kind = (int)v[8], .float8 = (int)v[9],
        .dim = NONE, .power_of_2 = (int)v[10],
        .threads = v[11] < 1 ? 1 : v[11] > MOST_THREADS ? MOST_THREADS : (int)v[11],
    };
    const float kept = *(const float *)(intptr_t)v[2];
    float *observed = (float *)(intptr_t)v[5];
    int failed;
    if (job.rows * job.columns < RELEASE_GIL_FROM) {
        failed = cast_and_observe_matrix(&job, kept, observed);
    } else {
        Py_BEGIN_ALLOW_THREADS
        failed = cast_and_observe_matrix(&job, kept, observed);
        Py_END_ALLOW_THREADS
    }
    if (failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *get_elements_read(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self, (void)args, (void)count;
    return PyLong_FromLongLong(elements_read);
}

/* Seventeen integers: out; of a: codes, float8 kind, row stride, column stride, scale, whether it is row-wise; the same of
 * b; m, k, n; hp kind of out. */
static PyObject *small_mm(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    int64_t v[17];
    if (!read_integers(args, count, v, 17)) return NULL;
    const int64_t m = v[13], k = v[14], n = v[15];
    float *work = PyMem_RawMalloc((k * n + k + n + 1) * sizeof(float));
    if (work == NULL) return PyErr_NoMemory();
    Operand a = {(const uint8_t *)(intptr_t)v[1], (int)v[2], v[3], v[4], (const float *)(intptr_t)v[5]};
    Operand b = {(const uint8_t *)(intptr_t)v[7], (int)v[8], v[9], v[10], (const float *)(intptr_t)v[11]};
    small_matmul(a, (int)v[6], b, (int)v[12], m, k, n, (int)v[16], work, (char *)(intptr_t)v[0]);
    PyMem_RawFree(work);
    Py_RETURN_NONE;
}

#define METHOD(NAME, DOC) {#NAME, (PyCFunction)(void (*)(void))NAME, METH_FASTCALL, DOC}
static PyMethodDef methods[] = {
    METHOD(dynamic_cast, "hp -> codes, quant_scale, dequant_scale"),
    METHOD(cast_with_scale, "hp, quant_scale -> codes"),
    METHOD(cast_and_observe, "hp, kept quant_scale -> codes, scales, amax, saturated elements"),
    {"elements_read", (PyCFunction)(void (*)(void))get_elements_read, METH_FASTCALL, "of hp matrices, ever"},
    METHOD(widen, "codes, dequant_scale -> hp"),
    METHOD(small_mm, "float8 matrices and their scales -> their product"),
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "quaver._cpu", .m_methods = methods};
PyMODINIT_FUNC PyInit__cpu(void) {
    for (int code = 0; code < 256; code++)
        VALUE[E4M3][code] = decode(code, FLOAT8[E4M3]), VALUE[E5M2][code] = decode(code, FLOAT8[E5M2]);
    return PyModuleDef_Init(&module);
}
