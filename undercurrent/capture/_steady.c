/* The steady step of a capture plan in machine code: compare, then copy rows into the ring. See `steady.py`.
 *
 * After a forward pass the caches hold none of our code, and every Python opcode costs a miss or several; this does one
 * step in one call. It knows one case only, in which nothing but positions, token ids and values has changed since the
 * plan was made, and says -1 for anything else: the caller then takes the way that knows them all.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* As in `sides.py`; `steady.py` compares them before it uses this. */
enum { HEAD = 8, TAIL = 16, STEPS = 25, HEARTBEAT = 26, FRAMES = 28 };
#define FRAME_MAGIC 0x4D524655u
#define STEP_KIND 2u
#define PAD_KIND 0u
#define FRAME_HEAD 16
#define ALIGNMENT 64

typedef struct {
    Py_buffer head;    /* prepared start of the frame, writable */
    Py_buffer source;  /* the tap buffer's rows */
    Py_buffer rows;    /* int64, which rows; obj is NULL where they are first..end */
    Py_ssize_t first, count, row_bytes, positions_at, tokens_at;
} Lane;

typedef struct {
    PyObject_HEAD
    Py_buffer words, data, starts, computed;
    PyObject *engine_ids, *history;
    int64_t reserve, rows, valid_for;
    Py_ssize_t slots, lane_count;
    Lane *lanes;
} Steady;

static void release(Py_buffer *view)
{
    if (view->obj != NULL)
        PyBuffer_Release(view);
}

static void Steady_dealloc(PyObject *object)
{
    Steady *self = (Steady *)object;
    PyTypeObject *type = Py_TYPE(object);
    for (Py_ssize_t i = 0; self->lanes != NULL && i < self->lane_count; i++) {
        release(&self->lanes[i].head);
        release(&self->lanes[i].source);
        release(&self->lanes[i].rows);
    }
    PyMem_Free(self->lanes);
    release(&self->words);
    release(&self->data);
    release(&self->starts);
    release(&self->computed);
    Py_XDECREF(self->engine_ids);
    Py_XDECREF(self->history);
    freefunc free_type = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_type(object);
    Py_DECREF(type);
}

static int take_lane(Lane *lane, PyObject *described, int64_t batch_rows)
{
    PyObject *head, *source, *rows;
    if (!PyArg_ParseTuple(described, "OOOnnnnn", &head, &source, &rows, &lane->first, &lane->count, &lane->row_bytes,
                          &lane->positions_at, &lane->tokens_at))
        return -1;
    if (PyObject_GetBuffer(head, &lane->head, PyBUF_WRITABLE) < 0)
        return -1;
    if (PyObject_GetBuffer(source, &lane->source, PyBUF_SIMPLE) < 0)
        return -1;
    if (rows != Py_None && PyObject_GetBuffer(rows, &lane->rows, PyBUF_SIMPLE) < 0)
        return -1;
    if (lane->count < 1 || lane->row_bytes < 1 || lane->positions_at < 16 ||
        lane->positions_at + 4 * lane->count > lane->head.len || lane->tokens_at + 4 * lane->count > lane->head.len ||
        (lane->rows.obj != NULL && lane->rows.len != 8 * lane->count) || batch_rows * lane->row_bytes > lane->source.len)
        goto wrong;
    if (lane->rows.obj == NULL) {
        if (lane->first < 0 || lane->first + lane->count > batch_rows)
            goto wrong;
        return 0;
    }
    for (Py_ssize_t i = 0; i < lane->count; i++) {
        int64_t row = ((const int64_t *)lane->rows.buf)[i];
        if (row < 0 || row >= batch_rows)
            goto wrong;
    }
    return 0;
wrong:
    PyErr_SetString(PyExc_ValueError, "a lane's sizes do not fit together");
    return -1;
}

static PyObject *Steady_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *words, *data, *engine_ids, *starts, *computed, *history, *lanes;
    long long reserve, rows, valid_for;
    if (!PyArg_ParseTuple(args, "OOLO!OOLLO!O!", &words, &data, &reserve, &PyList_Type, &engine_ids, &starts, &computed,
                          &rows, &valid_for, &PyList_Type, &history, &PyTuple_Type, &lanes))
        return NULL;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Steady *self = (Steady *)alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->reserve = reserve;
    self->rows = rows;
    self->valid_for = valid_for;
    Py_INCREF(engine_ids);
    self->engine_ids = engine_ids;
    Py_INCREF(history);
    self->history = history;
    self->slots = PyList_Size(engine_ids);
    self->lane_count = PyTuple_Size(lanes);
    self->lanes = PyMem_Calloc(self->lane_count ? self->lane_count : 1, sizeof(Lane));
    if (self->lanes == NULL) {
        PyErr_NoMemory();
        goto fail;
    }
    if (PyObject_GetBuffer(words, &self->words, PyBUF_WRITABLE) < 0 ||
        PyObject_GetBuffer(data, &self->data, PyBUF_WRITABLE) < 0 ||
        PyObject_GetBuffer(starts, &self->starts, PyBUF_SIMPLE) < 0 ||
        PyObject_GetBuffer(computed, &self->computed, PyBUF_SIMPLE) < 0)
        goto fail;
    if (self->words.len < 8 * 64 || self->starts.len != 4 * (self->slots + 1) || self->computed.len != 4 * self->slots ||
        rows != self->slots) {
        PyErr_SetString(PyExc_ValueError, "a steady plan has one row for each of its requests");
        goto fail;
    }
    for (Py_ssize_t i = 0; i < self->lane_count; i++)
        if (take_lane(&self->lanes[i], PyTuple_GetItem(lanes, i), rows) < 0)
            goto fail;
    return (PyObject *)self;
fail:
    Py_DECREF(self);
    return NULL;
}

/* Return where the payload of a frame begins, or -1 if `reserve` bytes would not stay free; writes the frame's head. */
static int64_t place(Steady *self, int64_t *cursor, int64_t tail, int64_t size)
{
    const int64_t capacity = self->data.len, total = (FRAME_HEAD + size + ALIGNMENT - 1) & -(int64_t)ALIGNMENT;
    int64_t start = *cursor % capacity, rest = capacity - start, need = total <= rest ? total : rest + total;
    char *data = self->data.buf;
    if (*cursor + need - tail > capacity - self->reserve)
        return -1;
    if (need != total) {
        uint32_t pad[2] = {FRAME_MAGIC, PAD_KIND};
        uint64_t pad_size = (uint64_t)(rest - FRAME_HEAD);
        memcpy(data + start, pad, 8);
        memcpy(data + start + 8, &pad_size, 8);
        start = 0;
    }
    uint32_t head[2] = {FRAME_MAGIC, STEP_KIND};
    uint64_t payload = (uint64_t)size;
    memcpy(data + start, head, 8);
    memcpy(data + start + 8, &payload, 8);
    *cursor += need;
    return start + FRAME_HEAD;
}

static void fill(Lane *lane, char *to, const int32_t *computed, const int32_t *tokens)
{
    char *head = lane->head.buf;
    const char *source = lane->source.buf;
    if (lane->rows.obj == NULL) {
        memcpy(head + lane->positions_at, computed + lane->first, 4 * lane->count);
        memcpy(head + lane->tokens_at, tokens + lane->first, 4 * lane->count);
        memcpy(to, head, lane->head.len);
        memcpy(to + lane->head.len, source + lane->first * lane->row_bytes, lane->count * lane->row_bytes);
        return;
    }
    const int64_t *rows = lane->rows.buf;
    int32_t *positions = (int32_t *)(head + lane->positions_at), *ids = (int32_t *)(head + lane->tokens_at);
    for (Py_ssize_t i = 0; i < lane->count; i++) {
        memcpy(&positions[i], &computed[rows[i]], 4);
        memcpy(&ids[i], &tokens[rows[i]], 4);
    }
    memcpy(to, head, lane->head.len);
    to += lane->head.len;
    for (Py_ssize_t i = 0; i < lane->count; i++, to += lane->row_bytes)
        memcpy(to, source + rows[i] * lane->row_bytes, lane->row_bytes);
}

static int same_step(Steady *self, int64_t steps, PyObject *ids, const Py_buffer *computed, const Py_buffer *starts,
                     const Py_buffer *tokens)
{
    if (computed->len < 4 * self->slots || starts->len < self->starts.len || tokens->len < 4 * self->slots)
        return 0;
    if (memcmp(starts->buf, self->starts.buf, self->starts.len) != 0)
        return 0;
    const int32_t *now = computed->buf, *first = self->computed.buf;
    for (Py_ssize_t i = 0; i < self->slots; i++)
        if ((int64_t)now[i] != first[i] + steps)
            return 0;
    if (!PyList_Check(ids) || PyList_Size(ids) != self->slots)
        return 0;
    for (Py_ssize_t i = 0; i < self->slots; i++) {
        PyObject *a = PyList_GetItem(ids, i), *b = PyList_GetItem(self->engine_ids, i);
        if (a != b) {
            int equal = PyObject_RichCompareBool(a, b, Py_EQ);
            if (equal <= 0)
                return equal;
        }
    }
    return 1;
}

static int64_t write_all(Steady *self, int64_t cursor, int64_t step, int64_t now_us, const int32_t *computed,
                         const int32_t *tokens)
{
    int64_t *words = self->words.buf;
    const int64_t tail = __atomic_load_n(&words[TAIL], __ATOMIC_ACQUIRE);
    for (Py_ssize_t i = 0; i < self->lane_count; i++) {
        Lane *lane = &self->lanes[i];
        const int64_t at = place(self, &cursor, tail, lane->head.len + lane->count * lane->row_bytes);
        if (at < 0)
            return -1;
        memcpy(lane->head.buf, &step, 8);
        memcpy((char *)lane->head.buf + 8, &now_us, 8);
        fill(lane, (char *)self->data.buf + at, computed, tokens);
    }
    words[STEPS] = step;
    words[HEARTBEAT] = now_us;
    words[FRAMES] += self->lane_count;
    __atomic_store_n(&words[HEAD], cursor, __ATOMIC_RELEASE);
    return cursor;
}

/* run(steps, step, rows, now_us, engine_ids, computed, starts, token_ids) -> new head of the ring, or -1 */
static PyObject *Steady_run(PyObject *object, PyObject *args)
{
    Steady *self = (Steady *)object;
    long long steps, step, rows, now_us;
    PyObject *ids, *computed_object, *starts_object, *tokens_object;
    if (!PyArg_ParseTuple(args, "LLLLOOOO", &steps, &step, &rows, &now_us, &ids, &computed_object, &starts_object,
                          &tokens_object))
        return NULL;
    int64_t *words = self->words.buf, cursor = -1;
    if (rows != self->rows || steps >= self->valid_for)
        return PyLong_FromLong(-1);
    Py_buffer computed = {0}, starts = {0}, tokens = {0};
    PyObject *result = NULL;
    if (PyObject_GetBuffer(computed_object, &computed, PyBUF_SIMPLE) < 0 ||
        PyObject_GetBuffer(starts_object, &starts, PyBUF_SIMPLE) < 0 ||
        PyObject_GetBuffer(tokens_object, &tokens, PyBUF_SIMPLE) < 0)
        goto done;
    int same = same_step(self, steps, ids, &computed, &starts, &tokens);
    if (same < 0)
        goto done;
    if (same) {
        PyObject *seen = PyBytes_FromStringAndSize(tokens.buf, 4 * self->slots);
        if (seen == NULL)
            goto done;
        cursor = write_all(self, words[HEAD], step, now_us, computed.buf, tokens.buf);
        int failed = cursor >= 0 && PyList_Append(self->history, seen) < 0;
        Py_DECREF(seen);
        if (failed)
            goto done;
    }
    result = PyLong_FromLongLong(cursor);
done:
    release(&computed);
    release(&starts);
    release(&tokens);
    return result;
}

static PyMethodDef methods[] = {
    {"run", Steady_run, METH_VARARGS, "Write one step; return the ring's new head, -1 where another way must be taken."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_doc, "See `steady.py`."},
    {Py_tp_new, Steady_new},
    {Py_tp_dealloc, Steady_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};
static PyType_Spec spec = {"undercurrent.capture._steady.Steady", sizeof(Steady), 0, Py_TPFLAGS_DEFAULT, slots};

static int fill_module(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&spec);
    if (type == NULL || PyModule_AddObjectRef(module, "Steady", type) < 0) {
        Py_XDECREF(type);
        return -1;
    }
    Py_DECREF(type);
    PyObject *layout = Py_BuildValue("(iiiiiii)", HEAD, TAIL, STEPS, HEARTBEAT, FRAMES, FRAME_HEAD, ALIGNMENT);
    int failed = layout == NULL || PyModule_AddObjectRef(module, "LAYOUT", layout) < 0;
    Py_XDECREF(layout);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, fill_module}, {0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_steady", NULL, 0, NULL, module_slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__steady(void)
{
    return PyModuleDef_Init(&module);
}
