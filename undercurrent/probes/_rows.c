/* Sums of products of rows and directions, in NumPy's own order: the same bits as `undercurrent.probes.scoring` gives.
 *
 * NumPy widens, multiplies and adds in a pass each; this does a row in one. The order is that of NumPy's pairwise sum:
 * eight sums over blocks of up to 128 elements, and halves of what is longer. No product may be fused with an addition:
 * the file is compiled with -ffp-contract=off, and `scoring.py` compares bits with NumPy's before it uses any of this.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

enum { BFLOAT16, FLOAT32, FLOAT64 };
enum { BLOCK = 128 };

typedef uint16_t halves __attribute__((vector_size(8)));
typedef uint32_t words __attribute__((vector_size(16)));
typedef float floats __attribute__((vector_size(16)));
typedef double doubles __attribute__((vector_size(32)));

static inline double one_bfloat16(const char *at)
{
    uint16_t half;
    uint32_t bits;
    float value;
    memcpy(&half, at, sizeof half);
    bits = (uint32_t)half << 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline double one_float32(const char *at)
{
    float value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline double one_float64(const char *at)
{
    double value;
    memcpy(&value, at, sizeof value);
    return value;
}

#define PLAIN_bfloat16(into, at) \
    do { \
        halves half; \
        words bits; \
        floats narrow; \
        memcpy(&half, at, sizeof half); \
        bits = __builtin_convertvector(half, words) << 16; \
        memcpy(&narrow, &bits, sizeof narrow); \
        into = __builtin_convertvector(narrow, doubles); \
    } while (0)
#define PLAIN_float32(into, at) \
    do { \
        floats narrow; \
        memcpy(&narrow, at, sizeof narrow); \
        into = __builtin_convertvector(narrow, doubles); \
    } while (0)
#define PLAIN_float64(into, at) memcpy(&into, at, sizeof into)

#define SUM(name, type, size, target, FOUR) \
    target static double name(const char *row, const double *weight, Py_ssize_t n) \
    { \
        if (n > BLOCK) { \
            Py_ssize_t half = n / 2; \
            half -= half % 8; \
            return name(row, weight, half) + name(row + half * size, weight + half, n - half); \
        } \
        double sum = 0.0; \
        Py_ssize_t at = 0; \
        if (n >= 8) { \
            doubles low, high, value, factor; \
            FOUR##_##type(value, row); \
            memcpy(&factor, weight, sizeof factor); \
            low = value * factor; \
            FOUR##_##type(value, row + 4 * size); \
            memcpy(&factor, weight + 4, sizeof factor); \
            high = value * factor; \
            for (at = 8; at + 8 <= n; at += 8) { \
                FOUR##_##type(value, row + at * size); \
                memcpy(&factor, weight + at, sizeof factor); \
                low += value * factor; \
                FOUR##_##type(value, row + (at + 4) * size); \
                memcpy(&factor, weight + at + 4, sizeof factor); \
                high += value * factor; \
            } \
            sum = ((low[0] + low[1]) + (low[2] + low[3])) + ((high[0] + high[1]) + (high[2] + high[3])); \
        } \
        for (; at < n; at++) \
            sum += one_##type(row + at * size) * weight[at]; \
        return sum; \
    }

typedef double (*Sum)(const char *, const double *, Py_ssize_t);

SUM(plain_bfloat16, bfloat16, 2, , PLAIN)
SUM(plain_float32, float32, 4, , PLAIN)
SUM(plain_float64, float64, 8, , PLAIN)
static const Sum PLAIN[] = {plain_bfloat16, plain_float32, plain_float64};
static const Py_ssize_t SIZES[] = {2, 4, 8};

#ifdef __x86_64__
/* Without "fma": products are rounded before they are added, as everywhere else. */
#define AVX2 __attribute__((target("avx2")))
/* By name: of the plain conversions GCC 12 makes twice as many instructions, and they are most of what a row takes. */
#define WIDE_bfloat16(into, at) \
    into = (doubles)_mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(_mm_loadu_si64(at)), 16)))
#define WIDE_float32(into, at) into = (doubles)_mm256_cvtps_pd(_mm_loadu_ps((const float *)(at)))
#define WIDE_float64 PLAIN_float64
SUM(wide_bfloat16, bfloat16, 2, AVX2, WIDE)
SUM(wide_float32, float32, 4, AVX2, WIDE)
SUM(wide_float64, float64, 8, AVX2, WIDE)
static const Sum WIDEST[] = {wide_bfloat16, wide_float32, wide_float64};

static const Sum *best(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") ? WIDEST : PLAIN;
}
#else
static const Sum *best(void)
{
    return PLAIN;
}
#endif

static PyObject *products(PyObject *module, PyObject *args)
{
    Py_buffer rows, weights, sums;
    Py_ssize_t width;
    int type;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*iny*w*", &rows, &type, &width, &weights, &sums))
        return NULL;
    PyObject *result = NULL;
    Py_ssize_t size = type >= BFLOAT16 && type <= FLOAT64 ? SIZES[type] : 0;
    if (size == 0 || width < 1 || width > PY_SSIZE_T_MAX / 8 || rows.len % (size * width) ||
        weights.len % (8 * width)) {
        PyErr_SetString(PyExc_ValueError, "rows or weights do not fit the width");
        goto done;
    }
    Py_ssize_t count = rows.len / (size * width), many = weights.len / (8 * width);
    /* Divided, not multiplied: a product of two numbers from outside may overflow. */
    if (many == 0 ? sums.len != 0 : sums.len % (8 * many) || sums.len / (8 * many) != count) {
        PyErr_SetString(PyExc_ValueError, "sums do not fit the rows");
        goto done;
    }
    Sum sum = best()[type];
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < count; at++)
        for (Py_ssize_t one = 0; one < many; one++)
            ((double *)sums.buf)[one * count + at] =
                sum((const char *)rows.buf + at * width * size, (const double *)weights.buf + one * width, width);
    Py_END_ALLOW_THREADS
    result = Py_None;
    Py_INCREF(result);
done:
    PyBuffer_Release(&rows);
    PyBuffer_Release(&weights);
    PyBuffer_Release(&sums);
    return result;
}

enum { AT_ONCE = 64 };

/* Sum the products of the rows of some pieces; 0 where their rows are not as many as there are places for sums. */
static int pieces(Sum sum, const Py_buffer *values, const int32_t *starts, Py_ssize_t count, Py_ssize_t row_bytes,
                  Py_ssize_t width, const double *weight, double *sums, Py_ssize_t *left)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t bytes = values[i].len - starts[i];
        if (starts[i] < 0 || bytes < 0 || bytes % row_bytes || bytes / row_bytes > *left)
            return 0;
        const char *row = (const char *)values[i].buf + starts[i];
        for (*left -= bytes / row_bytes; bytes > 0; bytes -= row_bytes, row += row_bytes)
            *sums++ = sum(row, weight, width);
    }
    return 1;
}

static PyObject *scattered(PyObject *module, PyObject *args)
{
    PyObject *values, *result = NULL;
    Py_buffer starts, weight, sums, held[AT_ONCE];
    Py_ssize_t width;
    int type;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!y*iny*w*", &PyList_Type, &values, &starts, &type, &width, &weight, &sums))
        return NULL;
    Py_ssize_t size = type >= BFLOAT16 && type <= FLOAT64 ? SIZES[type] : 0, count = starts.len / 4, done = 0;
    Py_ssize_t left = sums.len / 8;
    if (size == 0 || width < 1 || width > PY_SSIZE_T_MAX / 8 || weight.len != 8 * width || starts.len % 4 || sums.len % 8 ||
        PyList_Size(values) != count) {
        PyErr_SetString(PyExc_ValueError, "values, starts or weight do not fit");
        goto done;
    }
    Sum sum = best()[type];
    while (done < count) {
        Py_ssize_t many = 0, before = left;
        int fits = 1;
        for (; many < AT_ONCE && done + many < count; many++) {
            /* The list may have lost some while others ran. */
            PyObject *value = PyList_GetItem(values, done + many);
            if (value == NULL || PyObject_GetBuffer(value, &held[many], PyBUF_SIMPLE) < 0)
                break;
        }
        if (!PyErr_Occurred()) {
            Py_BEGIN_ALLOW_THREADS
            fits = pieces(sum, held, (const int32_t *)starts.buf + done, many, size * width, width,
                          (const double *)weight.buf, (double *)sums.buf + (sums.len / 8 - before), &left);
            Py_END_ALLOW_THREADS
        }
        for (Py_ssize_t i = 0; i < many; i++)
            PyBuffer_Release(&held[i]);
        if (PyErr_Occurred())
            goto done;
        if (!fits)
            break;
        done += many;
    }
    if (done < count || left != 0) {
        PyErr_SetString(PyExc_ValueError, "sums do not fit the rows");
        goto done;
    }
    result = Py_None;
    Py_INCREF(result);
done:
    PyBuffer_Release(&starts);
    PyBuffer_Release(&weight);
    PyBuffer_Release(&sums);
    return result;
}

static PyMethodDef methods[] = {
    {"scattered", scattered, METH_VARARGS,
     "scattered(values, starts, type, width, weight, sums): sums[n] of the rows that values hold, each from its start on."},
    {"products", products, METH_VARARGS, "products(rows, type, width, weights, sums): sums[k, n] of rows[n] by weights[k]."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_rows", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__rows(void)
{
    return PyModule_Create(&definition);
}
