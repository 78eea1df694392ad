/* quaver._cpu: the float8 casts of eager code on a CPU, one call each, and matmuls too small for a library's set-up.
 *
 * quaver/scaling.py says what is computed, and is matched bit for bit; quaver/kernels/cpu.py is the only caller.
 * Every matrix is [rows, columns], contiguous. `dim` is the one that an amax reduces: NONE (-1) for one amax or scale,
 * 1 for one a row [rows, 1], 0 for one a column [1, columns]. Addresses arrive as integers, and are trusted.
 *
 * Why it is written so:
 *   - Inner loops have no branches and no calls, so that compilers vectorise them. Kinds are constants there: each
 *     CLONES function picks an always-inlined body by switch, once per run of elements (runs.h). The loops that most
 *     time goes to are written in vectors as well, for CPUs that look bytes up (avx512.h).
 *   - Magnitudes of IEEE numbers order like their bits, NaNs on top, so an amax is a maximum of integers.
 *   - Floating point means what IEEE 754 says: no -ffast-math, no contraction, no excess precision.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "avx512.h"
#include "matmul.h"
#include "runs.h"

enum { NONE = -1 };                /* dim */
enum { RELEASE_GIL_FROM = 32768 }; /* elements; some microseconds of work */

/* ---- a matrix, in blocks of rows (of elements, where the dim does not matter), one thread each --------------------*/

typedef struct { float amax; int64_t saturated; } Observed;

typedef struct {
    char *hp;               /* [rows, columns] of hp_kind; what widen writes */
    uint8_t *codes;         /* [rows, columns] of float8; what widen reads */
    int64_t codes_row;      /* from one row of codes to the next; columns where they are written */
    char *amax;             /* of hp_kind; () or [1, columns]; while casting only */
    float *quant, *dequant; /* (), [rows, 1] or [1, columns] */
    int16_t *shifts;        /* [columns] of dequant scales; while widening with AVX-512 only */
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

typedef void (*Work)(const Job *, int, int64_t, int64_t);

/* work(job, block, first, last) for every block of 0..n; blocks differ in nothing that they write. */
static void in_blocks(Work work, const Job *job, int64_t n) {
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
        float amax = cast_and_see(hp, job->hp_kind, job->float8, *job->quant, n, codes);
        if (!(amax * *job->quant <= FLOAT8[job->float8].saturates_above && amax <= FLT_MAX))
            saturated += overflow_run(hp, job->hp_kind, job->float8, *job->quant, n, codes);
        if (bits_of(amax) > bits_of(largest)) largest = amax;
    }
    job->observed[block].amax = largest, job->observed[block].saturated = saturated;
}

/* Fills job->amax [length] by `work` on 0..n: each thread has a result of its own first. 0, or -1 without memory. */
static int fill_amax_by(Work work, const Job *job, int64_t n, int64_t length) {
    elements_read += job->rows * job->columns;
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

/* Tensorwise or by columns. */
static int fill_amax(const Job *job) {
    if (job->dim == NONE) return fill_amax_by(amax_of_elements, job, job->rows * job->columns, 1);
    return fill_amax_by(amax_of_columns, job, job->rows, job->columns);
}

static void cast_elements(const Job *job, int block, int64_t first, int64_t last) {
    (void)block;
    const char *hp = job->hp + first * hp_size(job);
    cast(hp, job->hp_kind, job->float8, job->quant, 0, last - first, job->codes + first);
}

static void cast_rows(const Job *job, int block, int64_t first, int64_t last) {
    (void)block;
    for (int64_t row = first; row < last; row++)
        cast(hp_row(job, row), job->hp_kind, job->float8, job->dim == 1 ? job->quant + row : job->quant, job->dim == 0,
             job->columns, job->codes + row * job->columns);
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

/* And the amaxes of columns, while a row is in the cache. */
static void dynamic_cast_rows_and_amax_of_columns(const Job *job, int block, int64_t first, int64_t last) {
    char *amax = job->amax + block * job->columns * hp_size(job);
    memset(amax, 0, job->columns * hp_size(job));
    for (int64_t row = first; row < last; row++) {
        dynamic_cast_rows(job, block, row, row + 1);
        amax_each(hp_row(job, row), job->hp_kind, job->columns, amax);
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

/* By rows into `by_rows` and by columns into `by_columns`, of one matrix, which is read twice from memory. */
static int dynamic_cast_axes(Job by_rows, Job by_columns) {
    by_rows.amax = PyMem_RawMalloc(by_rows.columns * hp_size(&by_rows) + 1);
    if (by_rows.amax == NULL) return -1;
    int failed = fill_amax_by(dynamic_cast_rows_and_amax_of_columns, &by_rows, by_rows.rows, by_rows.columns);
    if (!failed) {
        scales_run(by_rows.amax, by_rows.hp_kind, by_rows.float8, by_rows.power_of_2, by_rows.columns, by_columns.quant,
                   by_columns.dequant);
        cast_matrix(&by_columns);
    }
    PyMem_RawFree(by_rows.amax);
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
    const int scaling = job->dequant == NULL ? UNSCALED : job->dim == 0 ? SCALE_PER_ELEMENT : ONE_SCALE;
    for (int64_t row = first; row < last; row++)
        widen(job->codes + row * job->codes_row, job->float8, job->hp_kind, scaling,
              job->dim == 1 ? job->dequant + row : job->dequant, job->shifts, job->columns, hp_row(job, row));
}

static void widen_elements(const Job *job, int block, int64_t first, int64_t last) {
    (void)block;
    widen(job->codes + first, job->float8, job->hp_kind, job->dequant == NULL ? UNSCALED : ONE_SCALE, job->dequant, NULL,
          last - first, job->hp + first * hp_size(job));
}

static int widen_matrix(const Job *job) {
    if (job->dim == NONE && job->codes_row == job->columns) {
        in_blocks(widen_elements, job, job->rows * job->columns);
        return 0;
    }
    Job widening = *job;
    int16_t *shifts = NULL;
    if (job->dim == 0 && job->hp_kind == BFLOAT16 && uses_avx512) {
        shifts = PyMem_RawMalloc(job->columns * sizeof(int16_t) + 1);
        if (shifts == NULL) return -1;
        if (shifts_of(job->dequant, job->columns, shifts)) widening.shifts = shifts;
    }
    in_blocks(widen_rows, &widening, job->rows);
    PyMem_RawFree(shifts);
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
            float value = sums[j] * (a.scale[rowwise_a ? i : 0] * b.scale[rowwise_b ? j : 0]);
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

/* Without the GIL where that pays. Returns None, or NULL and a MemoryError. */
#define RUN(CALL, ELEMENTS) \
    do { \
        int failed; \
        if ((ELEMENTS) < RELEASE_GIL_FROM) { \
            failed = CALL; \
        } else { \
            Py_BEGIN_ALLOW_THREADS \
            failed = CALL; \
            Py_END_ALLOW_THREADS \
        } \
        if (failed) return PyErr_NoMemory(); \
        Py_RETURN_NONE; \
    } while (0)

static int threads_of(int64_t asked) { return asked < 1 ? 1 : asked > MOST_THREADS ? MOST_THREADS : (int)asked; }

/* These take the same twelve integers: hp, codes, quant_scale, dequant_scale (addresses, 0 for what is not used), rows,
 * columns, from one row of codes to the next, hp kind, float8 kind, dim, power_of_2, threads. They fill what they
 * compute. */
static PyObject *call(int (*matrix)(const Job *), PyObject *const *args, Py_ssize_t count) {
    int64_t v[12];
    if (!read_integers(args, count, v, 12)) return NULL;
    Job job = {
        .hp = (char *)(intptr_t)v[0], .codes = (uint8_t *)(intptr_t)v[1], .quant = (float *)(intptr_t)v[2],
        .dequant = (float *)(intptr_t)v[3], .rows = v[4], .columns = v[5], .codes_row = v[6], .hp_kind = (int)v[7],
        .float8 = (int)v[8], .dim = (int)v[9], .power_of_2 = (int)v[10], .threads = threads_of(v[11]),
    };
    RUN(matrix(&job), job.rows * job.columns);
}

#define ENTRY(NAME, MATRIX) \
    static PyObject *NAME(PyObject *self, PyObject *const *args, Py_ssize_t count) { \
        (void)self; \
        return call(MATRIX, args, count); \
    }
ENTRY(dynamic_cast, dynamic_cast_matrix)
ENTRY(cast_with_scale, cast_with_scale_matrix)
ENTRY(widen_codes, widen_matrix)

/* Thirteen integers: hp; codes, quant_scale and dequant_scale by rows, then by columns (addresses); rows, columns, hp
 * kind, float8 kind, power_of_2, threads. */
static PyObject *cast_axes(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    int64_t v[13];
    if (!read_integers(args, count, v, 13)) return NULL;
    Job by_rows = {
        .hp = (char *)(intptr_t)v[0], .codes = (uint8_t *)(intptr_t)v[1], .quant = (float *)(intptr_t)v[2],
        .dequant = (float *)(intptr_t)v[3], .rows = v[7], .columns = v[8], .codes_row = v[8], .hp_kind = (int)v[9],
        .float8 = (int)v[10], .dim = 1, .power_of_2 = (int)v[11], .threads = threads_of(v[12]),
    };
    Job by_columns = by_rows;
    by_columns.codes = (uint8_t *)(intptr_t)v[4], by_columns.quant = (float *)(intptr_t)v[5];
    by_columns.dequant = (float *)(intptr_t)v[6], by_columns.dim = 0;
    RUN(dynamic_cast_axes(by_rows, by_columns), by_rows.rows * by_rows.columns);
}

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
        .threads = threads_of(v[11]),
    };
    const float kept = *(const float *)(intptr_t)v[2];
    float *observed = (float *)(intptr_t)v[5];
    RUN(cast_and_observe_matrix(&job, kept, observed), job.rows * job.columns);
}

static PyObject *get_elements_read(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self, (void)args, (void)count;
    return PyLong_FromLongLong(elements_read);
}

/* One integer: whether to run avx512.h where the CPU has what it takes. Returns whether it ran, for tests of both. */
static PyObject *use_avx512(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    int64_t v[1];
    if (!read_integers(args, count, v, 1)) return NULL;
    const int before = uses_avx512;
    uses_avx512 = v[0] && has_avx512();
    return PyBool_FromLong(before);
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

/* Twenty integers: those of small_mm, and where it has those of a and b, from one row or column to the next, then along k;
 * bias or 0, threads, room. */
static PyObject *mm(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    int64_t v[20];
    if (!read_integers(args, count, v, 20)) return NULL;
    if (!runs_matmul) {
        PyErr_SetString(PyExc_RuntimeError, "this CPU does not run quaver's matmul; ask has_mm first");
        return NULL;
    }
    const int64_t m = v[13], k = v[14], n = v[15];
    const Product product = {
        .a = {(const uint8_t *)(intptr_t)v[1], (int)v[2], m, k, v[3], v[4]}, .a_scale = (const float *)(intptr_t)v[5],
        .rowwise_a = (int)v[6],
        .b = {(const uint8_t *)(intptr_t)v[7], (int)v[8], n, k, v[9], v[10]}, .b_scale = (const float *)(intptr_t)v[11],
        .rowwise_b = (int)v[12], .out = (char *)(intptr_t)v[0], .hp_kind = (int)v[16],
        .bias = (const float *)(intptr_t)v[17], .threads = threads_of(v[18]), .room = (uint32_t *)(intptr_t)v[19],
    };
    RUN(multiply_matrices(&product), m * n);
}

/* m, k, n, threads -> the bytes of room that mm takes. */
static PyObject *mm_room(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    int64_t v[4];
    if (!read_integers(args, count, v, 4)) return NULL;
    return PyLong_FromLongLong(room_of(v[0], v[1], v[2], threads_of(v[3])) * (int64_t)sizeof(uint32_t));
}

static PyObject *has_mm(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self, (void)args, (void)count;
    return PyBool_FromLong(runs_matmul);
}

#define METHOD(NAME, DOC) {#NAME, (PyCFunction)(void (*)(void))NAME, METH_FASTCALL, DOC}
static PyMethodDef methods[] = {
    METHOD(dynamic_cast, "hp -> codes, quant_scale, dequant_scale"),
    METHOD(cast_with_scale, "hp, quant_scale -> codes"),
    METHOD(cast_and_observe, "hp, kept quant_scale -> codes, scales, amax, saturated elements"),
    {"elements_read", (PyCFunction)(void (*)(void))get_elements_read, METH_FASTCALL, "of hp matrices, ever"},
    METHOD(cast_axes, "hp -> codes and scales by rows, and by columns"),
    {"widen", (PyCFunction)(void (*)(void))widen_codes, METH_FASTCALL, "codes, dequant_scale -> hp"},
    METHOD(use_avx512, "whether -> whether before"),
    METHOD(small_mm, "float8 matrices and their scales -> their product"),
    METHOD(mm, "the same and a bias, for those that are not small"),
    METHOD(mm_room, "m, k, n, threads -> bytes that mm packs into"),
    METHOD(has_mm, "whether mm runs on this CPU"),
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "quaver._cpu", .m_methods = methods};
PyMODINIT_FUNC PyInit__cpu(void) {
    for (int code = 0; code < 256; code++)
        VALUE[E4M3][code] = decode(code, FLOAT8[E4M3]), VALUE[E5M2][code] = decode(code, FLOAT8[E5M2]);
    fill_tables();
    uses_avx512 = has_avx512(), runs_matmul = has_matmul();
    return PyModuleDef_Init(&module);
}

