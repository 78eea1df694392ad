/* Statistics of a matrix and its cast, in one read; quaver/numerics/statistics.py defines them and is the oracle.
 *
 * Sums of squares and of fourth powers are float64. Each lane has a sum, and lanes are added in order. A run with one
 * scale has LANES lanes; a strip with a scale per column has one lane per column. All other statistics are counts or
 * comparisons of bits, and exact.
 */
#ifndef QUAVER_OBSERVE_H
#define QUAVER_OBSERVE_H

#include <math.h>

#include "runs.h"

enum { LANES = 64, STRIP = 512 };

typedef struct {
    double signal[STRIP], noise[STRIP]; /* sums of one block */
    double fourth[STRIP];               /* sums of all elements */
    uint32_t largest[STRIP], smallest[STRIP]; /* bits of finite magnitudes; bits - 1 of nonzero magnitudes */
    int32_t zeros[STRIP], nonfinite[STRIP], underflow[STRIP], saturated[STRIP];
} Lanes;

typedef struct {
    int64_t zeros, nonfinite, underflow, saturated;
    uint32_t largest, smallest;
    double fourth;
} Seen;

INLINE uint32_t smaller32(uint32_t a, uint32_t b) { return a < b ? a : b; }

/* Adds one element to lane j. `has_codes` is 0 if there are no codes. */
INLINE void observe_element(float hp, uint32_t code, Format f, double quant, double dequant, int has_codes,
                            Lanes *restrict lanes, int64_t j) {
    const uint32_t magnitude = bits_of(hp) & 0x7FFFFFFFu;
    const int finite = magnitude < 0x7F800000u;
    const double wide = finite ? hp : 0.0f;
    lanes->largest[j] = larger32(finite ? magnitude : 0, lanes->largest[j]);
    lanes->smallest[j] = smaller32(magnitude - 1, lanes->smallest[j]); /* 0 - 1 is the largest unsigned number */
    lanes->zeros[j] += magnitude == 0;
    lanes->nonfinite[j] += !finite;
    const double square = wide * wide;
    lanes->signal[j] += square;
    lanes->fourth[j] += square * square;
    if (!has_codes) return;
    const double error = wide - (double)decode(code, f) * dequant, scaled = (double)hp * quant;
    double noise = error * error;
    noise = noise <= DBL_MAX ? noise : (double)INFINITY; /* also for NaN */
    lanes->noise[j] += finite ? noise : 0.0;
    lanes->underflow[j] += finite & (magnitude != 0) & ((code & 0x7Fu) == 0);
    lanes->saturated[j] += (scaled > f.saturates_above) | (scaled < -f.saturates_above);
}

INLINE void observe_body(int hp_kind, const void *hp, const uint8_t *codes, Format f, const double *quant,
                         const double *dequant, int per_element, int has_codes, int64_t n, Lanes *restrict lanes) {
    if (per_element) {
        for (int64_t i = 0; i < n; i++)
            observe_element(load(hp, hp_kind, i), codes[i], f, quant[i], dequant[i], 1, lanes, i);
        return;
    }
    const double by = has_codes ? *quant : 0, back = has_codes ? *dequant : 0;
    const int64_t whole = n / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        for (int j = 0; j < LANES; j++)
            observe_element(load(hp, hp_kind, i + j), has_codes ? codes[i + j] : 0, f, by, back, has_codes, lanes, j);
    for (int64_t i = whole; i < n; i++)
        observe_element(load(hp, hp_kind, i), has_codes ? codes[i] : 0, f, by, back, has_codes, lanes, i - whole);
}

/* n elements with one scale, or n <= STRIP elements with one scale each if `per_element`. `codes` may be NULL. */
CLONES static void observe_run(const void *hp, int hp_kind, const uint8_t *codes, int float8, const double *quant,
                               const double *dequant, int per_element, int64_t n, Lanes *lanes) {
    const Format f = FLOAT8[float8];
    if (codes == NULL) BY_KIND(observe_body, hp_kind, hp, codes, FLOAT8[E4M3], quant, dequant, 0, 0, n, lanes)
    else if (per_element) BY_KIND(observe_body, hp_kind, hp, codes, f, quant, dequant, 1, 1, n, lanes)
    else if (float8 == E4M3) BY_KIND(observe_body, hp_kind, hp, codes, FLOAT8[E4M3], quant, dequant, 0, 1, n, lanes)
    else BY_KIND(observe_body, hp_kind, hp, codes, FLOAT8[E5M2], quant, dequant, 0, 1, n, lanes)
}

/* Adds the sums of n lanes to the sums of one scale, or of one scale each if `per_element`, and clears the lanes. */
static void add_sums(Lanes *lanes, int64_t n, int per_element, double *signal, double *noise) {
    for (int64_t j = 0; j < n; j++) {
        signal[per_element ? j : 0] += lanes->signal[j];
        noise[per_element ? j : 0] += lanes->noise[j];
        lanes->signal[j] = lanes->noise[j] = 0;
    }
}

/* ---- a matrix ----------------------------------------------------------------------------------------------------*/

typedef struct {
    const char *hp;
    const uint8_t *codes;          /* NULL, without scales, if there is no cast */
    const double *quant, *dequant; /* one per block */
    double *signal, *noise;        /* one per block; if all rows are in one block, per thread */
    int64_t rows, columns, code_row, block_rows, block_columns;
    int hp_kind, float8, threads;
    Seen *seen; /* one per thread */
} Observed;

/* Rows first..last of one row of blocks, whose first scale is `scale` and whose first sum is `sum`. */
static void observe_band(const Observed *job, int64_t first, int64_t last, int64_t scale, int64_t sum, Lanes *lanes) {
    const int64_t size = job->hp_kind == FLOAT32 ? 4 : 2;
    const int per_element = job->block_columns == 1 && job->columns > 1 && job->codes;
    const int64_t step = per_element ? STRIP : job->block_columns;
    for (int64_t start = 0; start < job->columns; start += step) {
        const int64_t n = least(step, job->columns - start), block = per_element ? start : start / step;
        for (int64_t row = first; row < last; row++)
            observe_run(job->hp + (row * job->columns + start) * size, job->hp_kind,
                        job->codes ? job->codes + row * job->code_row + start : NULL, job->float8,
                        job->quant + scale + block, job->dequant + scale + block, per_element, n, lanes);
        add_sums(lanes, per_element ? n : LANES, per_element, job->signal + sum + block, job->noise + sum + block);
    }
}

/* The part of one thread: rows of blocks, or its own sums if all rows are in one block. */
static void observe_thread(const Observed *job, int thread) {
    const int64_t rows = job->rows, height = least(job->block_rows, rows);
    const int64_t across = (job->columns + job->block_columns - 1) / job->block_columns;
    const int is_shared = height == rows;
    const int64_t bands = is_shared ? rows : (rows + height - 1) / height;
    const int64_t first = bands * thread / job->threads, last = bands * (thread + 1) / job->threads;
    Seen *seen = job->seen + thread;
    Lanes lanes;
    memset(&lanes, 0, sizeof lanes);
    memset(lanes.smallest, 0xFF, sizeof lanes.smallest);
    if (is_shared) observe_band(job, first, last, 0, thread * across, &lanes);
    else
        for (int64_t band = first; band < last; band++)
            observe_band(job, band * height, least((band + 1) * height, rows), band * across, band * across, &lanes);
    *seen = (Seen){.smallest = UINT32_MAX};
    for (int64_t j = 0; j < STRIP; j++) {
        seen->fourth += lanes.fourth[j];
        seen->zeros += lanes.zeros[j];
        seen->nonfinite += lanes.nonfinite[j];
        seen->underflow += lanes.underflow[j];
        seen->saturated += lanes.saturated[j];
        seen->largest = larger32(lanes.largest[j], seen->largest);
        seen->smallest = smaller32(lanes.smallest[j], seen->smallest);
    }
}

/* Sets `counts` to zeros, nonfinite, underflow, saturated, amax, the smallest nonzero magnitude (or infinity) and the
 * sum of fourth powers. */
static int observe_all(const Observed *job, double *counts) {
    Seen all = {.smallest = UINT32_MAX};
#pragma omp parallel for num_threads(job->threads) schedule(static, 1)
    for (int thread = 0; thread < job->threads; thread++) observe_thread(job, thread);
    for (int thread = 0; thread < job->threads; thread++) {
        const Seen *seen = job->seen + thread;
        all.fourth += seen->fourth;
        all.zeros += seen->zeros;
        all.nonfinite += seen->nonfinite;
        all.underflow += seen->underflow;
        all.saturated += seen->saturated;
        all.largest = larger32(seen->largest, all.largest);
        all.smallest = smaller32(seen->smallest, all.smallest);
    }
    counts[0] = (double)all.zeros;
    counts[1] = (double)all.nonfinite;
    counts[2] = (double)all.underflow;
    counts[3] = (double)all.saturated;
    counts[4] = float_of(all.largest);
    counts[5] = all.smallest < 0x7F7FFFFFu ? float_of(all.smallest + 1) : (double)INFINITY;
    counts[6] = all.fourth;
    return 0;
}

#endif
