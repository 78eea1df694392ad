/* A step of AdamW whose moments are stored in 8 or 16 bits, bit-identical to quaver/optim/update.py and rounding.py.
 * Blocks of up to 256 elements stay in the L1 cache.
 */
#ifndef QUAVER_ADAMW_H
#define QUAVER_ADAMW_H

#include <math.h>

#include "runs.h"

enum { ADAM_BLOCK = 256, CODES = 3 /* a kind of moments, after FLOAT32 and BFLOAT16 */ };

typedef struct { float decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, correction, eps; } Scalars;

typedef struct {
    char *param, *grad, *mean, *square; /* [rows, columns], contiguous */
    float *mean_scale, *square_scale;   /* [rows, blocks of a row], for CODES */
    const Scalars *scalars;
    int64_t *skipped;
    int64_t rows, columns, lane, first, inner, outer; /* see BlockGrid in quaver/optim/blocks.py */
    int64_t row_blocks;                               /* from one row's first block to the next row's */
    uint32_t key;
    int param_kind, grad_kind, mean_kind, square_kind, threads;
} Adam;

INLINE int64_t kind_size(int kind) { return kind == FLOAT32 ? 4 : kind == CODES ? 1 : 2; }

INLINE uint32_t mix(uint32_t bits) {
    bits = (bits ^ bits >> 16) * 0x7FEB352Du;
    bits = (bits ^ bits >> 15) * 0x846CA68Bu;
    return bits ^ bits >> 16;
}

INLINE float load_moment(const char *from, int kind, float scale, int i) {
    return kind == CODES ? decode((uint8_t)from[i], FLOAT8[E4M3]) * scale : load(from, kind, i);
}

INLINE uint16_t rounded_bfloat16(float value, uint32_t noise) {
    const uint32_t bits = bits_of(value), is_finite = (bits & 0x7FFFFFFFu) < 0x7F800000u;
    return is_finite ? (uint16_t)((bits + noise) >> 16) : bfloat16_of(value);
}

INLINE uint8_t rounded_code(float value, float quant, uint32_t noise, uint32_t least_code) {
    const float magnitude = float_of(bits_of(value) & 0x7FFFFFFFu) * quant;
    const uint32_t is_subnormal = magnitude < 0x1p-6f;
    const float lifted = magnitude + (is_subnormal ? 0x1p-6f : 0.0f);
    uint32_t code = ((bits_of(lifted) + (noise << 4)) >> 20) - (120 << 3) - (is_subnormal << 3);
    code = code < 0x7E ? code : 0x7E;
    code = code > least_code * (magnitude > 0) ? code : least_code * (magnitude > 0);
    return (uint8_t)(code | (bits_of(value) >> 24 & 0x80));
}

/* values -> a moment of `kind`. */
INLINE void store_moment(const float *restrict values, uint32_t amax, const uint32_t *restrict noise, int shift,
                         uint32_t least_code, int kind, int n, char *restrict to, float *scale) {
    if (kind == FLOAT32) memcpy(to, values, n * sizeof(float));
    else if (kind == BFLOAT16) for (int i = 0; i < n; i++)
        ((uint16_t *)to)[i] = rounded_bfloat16(values[i], noise[i] >> shift & 0xFFFF);
    else {
        float quant = 448.0f / float_of(amax);
        quant = quant < 0x1p120f ? quant : 0x1p120f;
        *scale = 1.0f / quant;
        for (int i = 0; i < n; i++)
            ((uint8_t *)to)[i] = rounded_code(values[i], quant, noise[i] >> shift & 0xFFFF, least_code);
    }
}

/* Updates n elements from `at`, from `lane` of the block with this key. Returns 1 if it skipped them, else 0. */
INLINE int adam_block(const Adam *job, int param_kind, int grad_kind, int mean_kind, int square_kind, int64_t at,
                      uint32_t key, int lane, int n, float *mean_scale, float *square_scale) {
    const Scalars s = *job->scalars;
    char *param = job->param + at * kind_size(param_kind), *square_at = job->square + at * kind_size(square_kind);
    char *mean_at = job->mean + at * kind_size(mean_kind);
    const char *grad = job->grad + at * kind_size(grad_kind);
    const float old_mean_scale = mean_scale ? *mean_scale : 1.0f, old_scale = square_scale ? *square_scale : 1.0f;
    float mean[ADAM_BLOCK], square[ADAM_BLOCK], root[ADAM_BLOCK];
    uint32_t bits[ADAM_BLOCK], largest_mean = 0, largest_root = 0;
    for (int i = 0; i < n; i++) {
        const float gradient = load(grad, grad_kind, i);
        float old = load_moment(square_at, square_kind, old_scale, i);
        old = square_kind == CODES ? old * old : old;
        mean[i] = load_moment(mean_at, mean_kind, old_mean_scale, i) * s.beta1 + gradient * s.one_minus_beta1;
        square[i] = old * s.beta2 + gradient * gradient * s.one_minus_beta2;
        root[i] = sqrtf(square[i]);
        largest_mean = larger32(bits_of(mean[i]) & 0x7FFFFFFFu, largest_mean);
        largest_root = larger32(bits_of(root[i]) & 0x7FFFFFFFu, largest_root);
    }
    if (largest_mean >= 0x7F800000u || largest_root >= 0x7F800000u) return 1;
    for (int i = 0; i < n; i++) {
        bits[i] = mix(key + (uint32_t)(lane + i) * 0x9E3779B9u);
        const float step = s.step_size * (mean[i] / (root[i] / s.correction + s.eps));
        const float value = load(param, param_kind, i) * s.decay - step;
        if (param_kind == FLOAT32) ((float *)param)[i] = value;
        else ((uint16_t *)param)[i] = rounded_bfloat16(value, mix(bits[i] ^ 0x85EBCA6Bu) & 0xFFFF);
    }
    store_moment(mean, largest_mean, bits, 0, 0, mean_kind, n, mean_at, mean_scale);
    store_moment(square_kind == CODES ? root : square, largest_root, bits, 16, 1, square_kind, n, square_at,
                 square_scale);
    return 0;
}

/* The usual kinds are constants, so that loops have no branches. */
CLONES static int adam_block_of_kinds(const Adam *job, int64_t at, uint32_t key, int lane, int n, float *mean_scale,
                                      float *square_scale) {
    const int param = job->param_kind, grad = job->grad_kind, mean = job->mean_kind, square = job->square_kind;
#define OF(P, G, M, S) \
    if (param == P && grad == G && mean == M && square == S) \
        return adam_block(job, P, G, M, S, at, key, lane, n, mean_scale, square_scale);
    OF(FLOAT32, FLOAT32, CODES, CODES)
    OF(BFLOAT16, BFLOAT16, CODES, CODES)
    OF(FLOAT32, FLOAT32, FLOAT32, FLOAT32)
    return adam_block(job, param, grad, mean, square, at, key, lane, n, mean_scale, square_scale);
#undef OF
}

static void adam_rows(const Adam *job, int64_t first, int64_t last, int64_t *skipped) {
    const int64_t blocks = (job->lane + job->columns + ADAM_BLOCK - 1) / ADAM_BLOCK;
    for (int64_t row = first; row < last; row++) {
        const int64_t number = job->first + row / job->inner * job->outer + row % job->inner * job->row_blocks;
        for (int64_t block = 0, column = 0; column < job->columns; block++) {
            const int lane = block ? 0 : (int)job->lane;
            const int n = (int)least(ADAM_BLOCK - lane, job->columns - column);
            const int64_t scale = row * blocks + block;
            *skipped += adam_block_of_kinds(job, row * job->columns + column,
                                            mix(job->key + (uint32_t)(number + block) * 0x9E3779B1u), lane, n,
                                            job->mean_scale ? job->mean_scale + scale : NULL,
                                            job->square_scale ? job->square_scale + scale : NULL);
            column += n;
        }
    }
}

static int adam_matrix(const Adam *job) {
    int64_t skipped = 0;
#pragma omp parallel for num_threads(job->threads) schedule(static, 1) reduction(+ : skipped) if (job->threads > 1)
    for (int part = 0; part < job->threads; part++)
        adam_rows(job, job->rows * part / job->threads, job->rows * (part + 1) / job->threads, &skipped);
    *job->skipped += skipped;
    return 0;
}

#endif
