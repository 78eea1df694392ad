/* quaver._cpu: float8 casts on a CPU, and a float8 matmul for CPUs with bfloat16 dot products.
 *
 * Casts are bit-identical to quaver/recipes/scaling.py. quaver/kernels/cpu.py is the only caller. Every matrix is
 * [rows, columns] and contiguous. `dim` is the dim that an amax reduces: NONE (-1) for one amax or scale, 1 for one per
 * row [rows, 1], 0 for one per column [1, columns], BLOCKS (2) for one per block; last blocks may be cut.
 *
 * Addresses are integers. An address of 0 for elements, sizes below 0 or above 2^60, and unknown kinds raise
 * ValueError. Python checks that the memory exists.
 *
 * Floating point follows IEEE 754: no -ffast-math, no contraction, no excess precision. Magnitudes of IEEE numbers
 * order like their bits, with NaNs on top, so an amax is a maximum of integers.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>

#include "adamw.h"
#include "matmul.h"
#include "observe.h"

enum { NONE = -1, BLOCKS = 2 /* dims */, RELEASE_GIL_FROM = 32768 /* elements; some microseconds of work */ };
enum { MOST_THREADS = 64, CACHED = 8192 /* elements that stay in the L1 cache between two runs over them */ };
enum { BLOCK_RUN = 2048 /* columns of blocks per run; a wider block is one run */ };

/* ---- a matrix, in chunks of rows, one thread each ----------------------------------------------------------------*/

typedef struct {
    char *hp;               /* [rows, columns] of hp_kind; widen writes it */
    uint8_t *codes;         /* [rows, columns] of float8; widen reads it */
    float *quant, *dequant; /* one per amax, by `dim`; widen multiplies by `quant` */
    uint8_t *column_codes;  /* for dynamic_cast_both_dims: scales [1, columns]; the fields above are then by rows */
    float *column_quant, *column_dequant;
    const float *persistent_quant;   /* for cast_and_record_amax: () */
    float *amax_buffer;              /* for cast_and_record_amax: [amax, saturated elements] */
    int64_t rows, columns, code_row; /* code_row: stride of the rows of codes; `columns` for written codes */
    int64_t block_rows, block_columns; /* for BLOCKS: scales are [ceil(rows / ..), ceil(columns / ..)] */
    int hp_kind, float8, dim, power_of_2, threads;
    int is_own_scale;   /* whether this job computes `quant`: see cast_run */
    int divides;        /* whether to divide by `quant`: see divide_run */
    char *amax;         /* [threads, 1 or columns] of hp_kind, while it is computed */
    int64_t *saturated; /* the count of all chunks of rows */
} Job;

static int64_t elements_read; /* of hp matrices, in this process, for tests; approximate without the GIL */

INLINE int64_t hp_size(const Job *job) { return job->hp_kind == FLOAT32 ? 4 : 2; }
INLINE char *hp_at(const Job *job, int64_t element) { return job->hp + element * hp_size(job); }

typedef void (*Work)(const Job *, int, int64_t, int64_t);

/* Calls work(job, chunk, first, last) for each chunk of 0..n, one per thread. Chunks write to different memory. */
static void for_each_chunk(Work work, const Job *job, int64_t n) {
    if (job->threads == 1) {
        work(job, 0, 0, n);
        return;
    }
#pragma omp parallel for num_threads(job->threads) schedule(static, 1)
    for (int chunk = 0; chunk < job->threads; chunk++)
        work(job, chunk, n * chunk / job->threads, n * (chunk + 1) / job->threads);
}

/* ---- casts -------------------------------------------------------------------------------------------------------*/

/* The number of amaxes that `fill_scales` computes. */
INLINE int64_t amaxes_of(const Job *job) { return job->dim == NONE ? 1 : job->columns; }

/* Tensorwise amaxes, or amaxes of columns. */
static void amax_of_rows(const Job *job, int chunk, int64_t first, int64_t last) {
    char *amax = job->amax + chunk * amaxes_of(job) * hp_size(job);
    const int64_t columns = job->columns;
    if (job->dim == NONE) amax_run(hp_at(job, first * columns), job->hp_kind, (last - first) * columns, amax);
    else for (int64_t row = first; row < last; row++)
        amax_each(hp_at(job, row * columns), job->hp_kind, columns, amax);
}

INLINE int64_t blocks_in(int64_t elements, int64_t length) { return (elements + length - 1) / length; }

/* The number of columns of a row that are cast or widened in one run. */
INLINE int64_t run_length(const Job *job) {
    const int is_cut = job->dim == BLOCKS && job->block_columns < job->columns;
    return is_cut ? BLOCK_RUN / job->block_columns * job->block_columns : job->columns;
}

typedef struct { const float *at; int per_element; } RunScale;

/* The scales of a run of n columns from `start`; scales of blocks are repeated for each element. */
INLINE RunScale scale_of_run(const Job *job, int64_t row, int64_t start, int64_t n, float *repeated) {
    if (job->dim != BLOCKS) return (RunScale){job->dim == 1 ? job->quant + row : job->quant, job->dim == 0};
    const int64_t length = job->block_columns;
    if (length >= job->columns) return (RunScale){job->quant + row / job->block_rows, 0};
    const float *scale = job->quant + row / job->block_rows * blocks_in(job->columns, length) + start / length;
    if (length == 1) return (RunScale){scale, 1};
    repeat_run(scale, length, n, repeated);
    return (RunScale){repeated, 1};
}

static void cast_elements(const Job *job, int64_t at, RunScale scale, int64_t n) {
    if (job->divides) divide_run(hp_at(job, at), job->hp_kind, job->float8, scale.at, scale.per_element, n, job->codes + at);
    else cast_run(hp_at(job, at), job->hp_kind, job->float8, scale.at, scale.per_element, job->is_own_scale, n,
                  job->codes + at);
}

static void cast_rows(const Job *job, int chunk, int64_t first, int64_t last) {
    (void)chunk;
    const int64_t columns = job->columns, length = run_length(job);
    float repeated[BLOCK_RUN];
    if (job->dim == NONE) {
        cast_elements(job, first * columns, (RunScale){job->quant, 0}, (last - first) * columns);
        return;
    }
    for (int64_t row = first; row < last; row++)
        for (int64_t start = 0; start < columns; start += length) {
            const int64_t at = row * columns + start, n = least(length, columns - start);
            cast_elements(job, at, scale_of_run(job, row, start, n, repeated), n);
        }
}

static int cast_with_scale_matrix(const Job *job) {
    elements_read += job->rows * job->columns;
    for_each_chunk(cast_rows, job, job->rows);
    return 0;
}

static int cast_by_divisor_matrix(const Job *job) {
    Job dividing = *job;
    dividing.divides = 1;
    return cast_with_scale_matrix(&dividing);
}

/* The amaxes of blocks, one band of blocks [block_rows, columns] at a time. */
static void amax_of_bands(const Job *job, int chunk, int64_t first, int64_t last) {
    (void)chunk;
    const int64_t columns = job->columns, length = job->block_columns, size = hp_size(job);
    const int64_t run = run_length(job);
    char amaxes[BLOCK_RUN * sizeof(float)];
    for (int64_t band = first; band < last; band++)
        for (int64_t start = 0; start < columns; start += run) {
            const int64_t n = least(run, columns - start);
            char *out = job->amax + (band * blocks_in(columns, length) + start / length) * size;
            char *of_columns = length == 1 ? out : amaxes;
            memset(of_columns, 0, n * size);
            for (int64_t row = band * job->block_rows; row < least((band + 1) * job->block_rows, job->rows); row++)
                amax_each(hp_at(job, row * columns + start), job->hp_kind, n, of_columns);
            if (length > 1) for (int64_t i = 0; i < n; i += length, out += size)
                amax_run(amaxes + i * size, job->hp_kind, least(length, n - i), out);
        }
}

static int block_amax_matrix(const Job *job) {
    Job finding = *job;
    finding.amax = (char *)job->quant;
    elements_read += job->rows * job->columns;
    for_each_chunk(amax_of_bands, &finding, blocks_in(job->rows, job->block_rows));
    return 0;
}

/* amax, scale and cast of one row at a time, while it is in the cache; and amaxes of columns if requested. */
static void dynamic_cast_rows(const Job *job, int chunk, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
        uint32_t amax;
        amax_run(hp_at(job, row * job->columns), job->hp_kind, job->columns, &amax);
        scales_run(&amax, job->hp_kind, job->float8, job->power_of_2, 1, job->quant + row, job->dequant + row);
        cast_rows(job, chunk, row, row + 1);
        if (job->amax) amax_of_rows(job, chunk, row, row + 1);
    }
}

/* Computes amaxes by `work`, first per thread, then scales from them. Returns -1 if out of memory. */
static int fill_scales(const Job *job, Work work, float *quant, float *dequant) {
    const int64_t length = amaxes_of(job), bytes = length * hp_size(job);
    Job finding = *job;
    finding.amax = calloc(job->threads, bytes + 1);
    if (finding.amax == NULL) return -1;
    elements_read += job->rows * job->columns;
    for_each_chunk(work, &finding, job->rows);
    for (int chunk = 1; chunk < job->threads; chunk++)
        amax_each(finding.amax + chunk * bytes, job->hp_kind, length, finding.amax);
    scales_run(finding.amax, job->hp_kind, job->float8, job->power_of_2, length, quant, dequant);
    free(finding.amax);
    return 0;
}

static int dynamic_cast_matrix(const Job *job) {
    if (job->dim != 1) {
        if (fill_scales(job, amax_of_rows, job->quant, job->dequant)) return -1;
        return cast_with_scale_matrix(job);
    }
    elements_read += job->rows * job->columns; /* a second read is from the cache */
    for_each_chunk(dynamic_cast_rows, job, job->rows);
    return 0;
}

/* Casts by rows and by columns; the matrix is read twice from memory. */
static int dynamic_cast_both_dims_matrix(const Job *job) {
    Job by_rows = *job, by_columns = *job;
    by_rows.dim = 1;
    by_columns.dim = 0;
    by_columns.codes = job->column_codes;
    by_columns.quant = job->column_quant;
    if (fill_scales(&by_rows, dynamic_cast_rows, job->column_quant, job->column_dequant)) return -1;
    return cast_with_scale_matrix(&by_columns);
}

/* Reads memory once: a few elements at a time, which are then cast from the cache. */
static void cast_and_record_amax_rows(const Job *job, int chunk, int64_t first, int64_t last) {
    (void)chunk;
    uint32_t bits, largest = 0;
    int64_t saturated = 0;
    for (int64_t start = first * job->columns, end = last * job->columns; start < end; start += CACHED) {
        const char *hp = hp_at(job, start);
        const int32_t n = (int32_t)least(CACHED, end - start);
        amax_run(hp, job->hp_kind, n, &bits);
        largest = larger32(bits_of(load(&bits, job->hp_kind, 0)), largest);
        saturated += counting_cast_run(hp, job->hp_kind, job->float8, *job->quant, n, job->codes + start);
    }
#pragma omp critical
    {
        float *amax = job->amax_buffer;
        /* Comparisons with NaN are false, so NaN stays; -1 means that no amax was recorded. */
        if (!(float_of(largest) <= *amax) && *amax == *amax) *amax = float_of(largest);
        *job->saturated += saturated;
    }
}

/* Raises amax_buffer to the maximum of itself and the amax and saturated elements of this cast. */
static int cast_and_record_amax_matrix(const Job *job) {
    int64_t saturated = 0;
    Job recording = *job;
    recording.dim = NONE;
    recording.saturated = &saturated;
    *job->quant = *job->persistent_quant;
    *job->dequant = 1.0f / *job->quant;
    if (!(*job->quant > 0) && fill_scales(&recording, amax_of_rows, job->quant, job->dequant)) return -1;
    elements_read += job->rows * job->columns;
    for_each_chunk(cast_and_record_amax_rows, &recording, job->rows);
    if ((float)saturated > job->amax_buffer[1]) job->amax_buffer[1] = (float)saturated;
    return 0;
}

/* ---- widening ----------------------------------------------------------------------------------------------------*/

static void widen_rows(const Job *job, int chunk, int64_t first, int64_t last) {
    (void)chunk;
    const int64_t columns = job->columns, length = run_length(job);
    const float one = 1.0f;
    float repeated[BLOCK_RUN];
    for (int64_t row = first; row < last; row++)
        for (int64_t start = 0; start < columns; start += length) {
            const int64_t n = least(length, columns - start);
            const RunScale scale =
                job->quant ? scale_of_run(job, row, start, n, repeated) : (RunScale){&one, 0};
            widen_run(job->codes + row * job->code_row + start, job->float8, job->hp_kind, scale.at, scale.per_element,
                      n, hp_at(job, row * columns + start));
        }
}

static int widen_matrix(const Job *job) {
    for_each_chunk(widen_rows, job, job->rows);
    return 0;
}

/* ---- Python ------------------------------------------------------------------------------------------------------*/

#define MOST_ELEMENTS ((int64_t)1 << 60)

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

/* Returns 0 with a ValueError unless `value` is in least..most. */
static int is_within(const char *name, int64_t value, int64_t least, int64_t most) {
    if (value >= least && value <= most) return 1;
    PyErr_Format(PyExc_ValueError, "%s: expected %lld to %lld, got %lld", name, (long long)least, (long long)most,
                 (long long)value);
    return 0;
}

/* Whether a matrix may have these sizes. */
static int is_size(int64_t rows, int64_t columns) {
    return is_within("rows", rows, 0, MOST_ELEMENTS) && is_within("columns", columns, 0, MOST_ELEMENTS) &&
           is_within("rows", rows, 0, MOST_ELEMENTS / (columns ? columns : 1));
}

/* Whether `address` may hold `elements`. */
static int is_memory(int64_t address, int64_t elements) {
    if (elements == 0 || address != 0) return 1;
    PyErr_Format(PyExc_ValueError, "expected the address of %lld elements, got 0", (long long)elements);
    return 0;
}

/* Releases the GIL for large jobs. Returns None, or NULL with a MemoryError. */
#define RUN(CALL, ELEMENTS) \
    do { \
        PyThreadState *released = (ELEMENTS) < RELEASE_GIL_FROM ? NULL : PyEval_SaveThread(); \
        const int failed = CALL; \
        if (released) PyEval_RestoreThread(released); \
        if (failed) return PyErr_NoMemory(); \
        Py_RETURN_NONE; \
    } while (0)

static int threads_of(int64_t asked) { return asked < 1 ? 1 : asked > MOST_THREADS ? MOST_THREADS : (int)asked; }

enum { ADDRESSES = 7, INTEGERS = 17 };

/* Takes INTEGERS integers: seven addresses (0 for addresses that the entry does not need), rows, columns, stride of the
 * rows of codes, hp kind, float8 kind, dim, power_of_2, threads, rows and columns of a block or 0. `needs` has a letter
 * for the number of elements at each address: e all elements, s one per scale, r one per row, c one per column, 1 one,
 * 0 none. */
static PyObject *call(int (*matrix)(const Job *), const char *needs, PyObject *const *args, Py_ssize_t count) {
    int64_t v[INTEGERS], *sizes = v + ADDRESSES;
    if (!read_integers(args, count, v, INTEGERS)) return NULL;
    const int64_t rows = sizes[0], columns = sizes[1], dim = sizes[5];
    const int64_t most_kind = matrix == widen_matrix ? BFLOAT16 : FLOAT16;
    const int scales_by_block =
        matrix == block_amax_matrix || matrix == cast_with_scale_matrix || matrix == cast_by_divisor_matrix ||
        matrix == widen_matrix;
    const int64_t most_in_block = matrix != block_amax_matrix && sizes[9] >= columns ? MOST_ELEMENTS : BLOCK_RUN;
    if (!is_size(rows, columns) || !is_within("hp kind", sizes[3], 0, most_kind) ||
        !is_within("float8 kind", sizes[4], 0, E5M2) || !is_within("dim", dim, NONE, scales_by_block ? BLOCKS : 1) ||
        !is_within("row of codes", sizes[2], columns, MOST_ELEMENTS / (rows ? rows : 1)) ||
        !is_within("rows of a block", sizes[8], dim == BLOCKS, MOST_ELEMENTS) ||
        !is_within("columns of a block", sizes[9], dim == BLOCKS, most_in_block))
        return NULL;
    for (int i = 0; needs[i]; i++) {
        const char need = needs[i] != 's' ? needs[i] : dim == NONE ? '1' : dim == 1 ? 'r' : dim == 0 ? 'c' : 'b';
        const int64_t elements = need == 'e'   ? rows * columns
                                 : need == 'r' ? rows
                                 : need == 'c' ? columns
                                 : need == 'b' ? blocks_in(rows, sizes[8]) * blocks_in(columns, sizes[9])
                                               : need == '1';
        if (!is_memory(v[i], elements)) return NULL;
    }
#define AT(I) ((void *)(intptr_t)v[I])
    const Job job = {
        .hp = AT(0), .codes = AT(1), .quant = AT(2), .dequant = AT(3),
        .column_codes = AT(4), .column_quant = AT(5), .column_dequant = AT(6),
        .persistent_quant = AT(4), .amax_buffer = AT(5),
        .rows = rows, .columns = columns, .code_row = sizes[2], .hp_kind = (int)sizes[3], .float8 = (int)sizes[4],
        .dim = (int)dim, .power_of_2 = sizes[6] != 0, .threads = threads_of(sizes[7]),
        .block_rows = sizes[8], .block_columns = sizes[9], .is_own_scale = matrix != cast_with_scale_matrix,
    };
    RUN(matrix(&job), rows * columns);
}

#define ENTRY(NAME, NEEDS) \
    static PyObject *NAME(PyObject *self, PyObject *const *args, Py_ssize_t count) { \
        (void)self; \
        return call(NAME##_matrix, NEEDS, args, count); \
    }
ENTRY(dynamic_cast, "eess")              /* hp -> codes, quant, dequant */
ENTRY(cast_with_scale, "ees")            /* hp, quant -> codes */
ENTRY(cast_by_divisor, "ees")            /* hp, dequant -> codes */
ENTRY(block_amax, "e0s")                 /* hp -> amaxes, in its dtype, at `quant` */
ENTRY(dynamic_cast_both_dims, "eerrecc") /* hp -> codes, quant, dequant by rows; the same by columns */
ENTRY(cast_and_record_amax, "ee1111")    /* hp, persistent_quant, amax_buffer -> codes, quant, dequant, amax_buffer */
ENTRY(widen, "ee")                       /* codes, quant or 0 -> hp */

static PyObject *get_elements_read(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self, (void)args, (void)count;
    return PyLong_FromLongLong(elements_read);
}

/* Takes one integer: whether to use lookup.h if the CPU supports it. Returns the previous setting. For tests. */
static PyObject *use_avx512(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    int64_t v[1];
    if (!read_integers(args, count, v, 1)) return NULL;
    const int before = uses_avx512;
    uses_avx512 = v[0] && has_avx512();
    return PyBool_FromLong(before);
}

/* Takes six integers of an operand: codes, float8 kind, stride of lines (see matmul.h), stride along k, scale, whether
 * there is one scale per line. */
static int read_factor(const int64_t *v, int64_t lines, int64_t k, Factor *factor) {
    if (!is_size(lines, k) || !is_memory(v[0], lines * k) || !is_within("float8 kind", v[1], 0, E5M2) ||
        !is_within("the stride that is not 1", v[2] == 1 ? v[3] : v[2], 0, MOST_ELEMENTS) ||
        !is_within("a stride", v[2] == 1 ? 1 : v[3], 1, 1) ||
        !is_within("whether a line has a scale", v[5], 0, 1) || !is_memory(v[4], v[5] ? lines : 1))
        return 0;
    *factor = (Factor){AT(0), (int)v[1], v[2], v[3], AT(4), (int)v[5], lines, k};
    return 1;
}

/* Takes 19 integers: out, six of a, six of b, m, k, n, hp kind of out (float32 or bfloat16), bias or 0, threads. */
static PyObject *mm(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    int64_t v[19];
    if (!read_integers(args, count, v, 19)) return NULL;
    if (!runs_matmul) {
        PyErr_SetString(PyExc_RuntimeError, "this CPU does not run quaver's matmul; ask has_mm first");
        return NULL;
    }
    const int64_t m = v[13], k = v[14], n = v[15];
    Product product = {.bias = AT(17), .hp_kind = (int)v[16], .threads = threads_of(v[18]), .out = AT(0)};
    if (!read_factor(v + 1, m, k, &product.a) || !read_factor(v + 7, n, k, &product.b) || !is_size(m, n) ||
        !is_memory(v[0], m * n) || !is_within("kind of the result", v[16], 0, BFLOAT16))
        return NULL;
    RUN(multiply_matrices(&product), m * n);
}

/* Takes 15 integers: hp, codes or 0, quant_scale and dequant_scale in float64, signal and noise of each block, counts,
 * rows, columns, stride of the rows of codes, hp kind, float8 kind, rows and columns of a block, threads. If all rows
 * are in one block, signal and noise are per thread: [threads, blocks]. */
static PyObject *observe(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    int64_t v[15];
    Seen seen[MOST_THREADS];
    if (!read_integers(args, count, v, 15)) return NULL;
    const int64_t rows = v[7], columns = v[8];
    if (!is_size(rows, columns) || !is_within("row of codes", v[9], columns, MOST_ELEMENTS / (rows ? rows : 1)) ||
        !is_within("hp kind", v[10], 0, FLOAT16) || !is_within("float8 kind", v[11], 0, E5M2) ||
        !is_within("rows of a block", v[12], 1, MOST_ELEMENTS) ||
        !is_within("columns of a block", v[13], 1, MOST_ELEMENTS) || !is_within("threads", v[14], 1, MOST_THREADS) ||
        !is_memory(v[0], rows * columns) || !is_memory(v[6], 7))
        return NULL;
    for (int i = 2; i < 6; i++)
        if (!is_memory(v[i], rows * columns)) return NULL;
    const Observed job = {
        .hp = AT(0), .codes = AT(1), .quant = AT(2), .dequant = AT(3), .signal = AT(4), .noise = AT(5),
        .rows = rows, .columns = columns, .code_row = v[9], .hp_kind = (int)v[10], .float8 = (int)v[11],
        .block_rows = v[12], .block_columns = v[13], .threads = (int)v[14], .seen = seen,
    };
    RUN(observe_all(&job, AT(6)), rows * columns);
}

/* Takes 21 integers: param, grad, mean, its scales or 0, square, its scales or 0, scalars, skipped; rows, columns,
 * lane, first, inner, outer, row_blocks; key; kinds of param, grad, mean and square; threads. */
static PyObject *adamw(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    int64_t v[21];
    if (!read_integers(args, count, v, 21)) return NULL;
    const int64_t rows = v[8], columns = v[9], elements = rows * columns;
    if (!is_size(rows, columns) || !is_within("lane", v[10], 0, ADAM_BLOCK - 1) ||
        !is_within("rows of a run", v[12], 1, MOST_ELEMENTS) || !is_within("kind of parameters", v[16], 0, BFLOAT16) ||
        !is_within("kind of gradients", v[17], 0, FLOAT16))
        return NULL;
    for (int moment = 0; moment < 2; moment++) /* its kind, and its scales */
        if (!is_within("kind of moments", v[18 + moment], 0, CODES) ||
            !is_memory(v[3 + 2 * moment], v[18 + moment] == CODES ? elements : 0))
            return NULL;
    for (int i = 0; i < 8; i++) if (i != 3 && i != 5 && !is_memory(v[i], elements)) return NULL;
    const Adam job = {
        .param = AT(0), .grad = AT(1), .mean = AT(2), .mean_scale = AT(3), .square = AT(4), .square_scale = AT(5),
        .scalars = AT(6), .skipped = AT(7), .rows = rows, .columns = columns, .lane = v[10], .first = v[11],
        .inner = v[12], .outer = v[13], .row_blocks = v[14], .key = (uint32_t)v[15], .param_kind = (int)v[16],
        .grad_kind = (int)v[17], .mean_kind = (int)v[18], .square_kind = (int)v[19], .threads = threads_of(v[20]),
    };
    RUN(adam_matrix(&job), elements);
}

static PyObject *has_mm(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self, (void)args, (void)count;
    return PyBool_FromLong(runs_matmul);
}

#define METHOD(NAME, FUNCTION, DOC) {NAME, (PyCFunction)(void (*)(void))FUNCTION, METH_FASTCALL, DOC}
static PyMethodDef methods[] = {
    METHOD("dynamic_cast", dynamic_cast, "hp -> codes, quant_scale, dequant_scale"),
    METHOD("cast_with_scale", cast_with_scale, "hp, quant_scale -> codes"),
    METHOD("cast_by_divisor", cast_by_divisor, "hp, dequant_scale -> codes"),
    METHOD("block_amax", block_amax, "hp -> amaxes of blocks"),
    METHOD("cast_and_record_amax", cast_and_record_amax, "hp, persistent quant_scale -> codes, scales, amax_buffer"),
    METHOD("dynamic_cast_both_dims", dynamic_cast_both_dims, "hp -> codes and scales by rows, and by columns"),
    METHOD("widen", widen, "codes, scale -> hp"),
    METHOD("mm", mm, "float8 matrices, their scales and a bias -> their product"),
    METHOD("observe", observe, "hp, codes, scales -> sums of blocks, counts"),
    METHOD("adamw", adamw, "one parameter, its gradient and moments -> the same after a step"),
    METHOD("has_mm", has_mm, "whether mm runs on this CPU"),
    METHOD("elements_read", get_elements_read, "of hp matrices, ever"),
    METHOD("use_avx512", use_avx512, "whether -> whether before"),
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "quaver._cpu", .m_methods = methods};
PyMODINIT_FUNC PyInit__cpu(void) {
    fill_tables();
    uses_avx512 = has_avx512();
    runs_matmul = has_matmul();
    return PyModuleDef_Init(&module);
}
