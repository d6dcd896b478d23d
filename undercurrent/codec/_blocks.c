/* What stands behind the first bytes of a block's record, as `blocks.py` reads it: seven fields, and one object of them;
 * and of many records at once, as `strands.py` reads them: where those fields lie.
 *
 * The bytes are anybody's: every length is compared with what is left before it is used. Whatever is not exactly the
 * usual block gives None, and the caller asks the decoder that knows all of Avro.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { SEQ, REVISION, STEP, CAPTURED_AT, NUMBERS };
static const char *const NUMBER_NAMES[NUMBERS] = {"seq", "revision", "step", "captured_at_us"};
static PyObject *number_names[NUMBERS], *positions_name, *token_ids_name, *data_name, *no_arguments;

/* Read an Avro long and move behind it; 0 where the bytes end before it, or it is longer than any long. */
static int number(const uint8_t *value, Py_ssize_t end, Py_ssize_t *at, int64_t *found)
{
    uint64_t bits = 0;
    for (unsigned shift = 0; *at < end; shift += shift < 70 ? 7 : 0) {
        uint8_t byte = value[(*at)++];
        uint64_t part = byte & 0x7F;
        /* Zeros may follow without end: they change nothing. */
        if (part > (shift < 63 ? 0x7F : shift == 63 ? 1 : 0))
            return 0;
        if (shift <= 63)
            bits |= part << shift;
        if (byte < 0x80) {
            *found = (int64_t)(bits >> 1) ^ -(int64_t)(bits & 1);
            return 1;
        }
    }
    return 0;
}

/* Read the length of an array that lies within the bytes, and move behind the length. */
static int length(const uint8_t *value, Py_ssize_t end, Py_ssize_t *at, Py_ssize_t *found)
{
    int64_t size;
    if (!number(value, end, at, &size) || size < 0 || size > end - *at)
        return 0;
    *found = (Py_ssize_t)size;
    return 1;
}

static int set(PyObject *block, PyObject *name, PyObject *value)
{
    if (value == NULL)
        return -1;
    /* Not the class's own way to set: blocks are frozen once they are made. */
    int failed = PyObject_GenericSetAttr(block, name, value);
    Py_DECREF(value);
    return failed;
}

static PyObject *rest_of(PyObject *value, Py_ssize_t at)
{
    PyObject *view = PyMemoryView_FromObject(value), *first = PyLong_FromSsize_t(at), *rest = NULL;
    PyObject *slice = first == NULL ? NULL : PySlice_New(first, NULL, NULL);
    if (view != NULL && slice != NULL)
        rest = PyObject_GetItem(view, slice);
    Py_XDECREF(view);
    Py_XDECREF(first);
    Py_XDECREF(slice);
    return rest;
}

static PyObject *made(PyObject *type, PyObject *same)
{
    newfunc make = PyType_Check(type) ? (newfunc)PyType_GetSlot((PyTypeObject *)type, Py_tp_new) : NULL;
    if (make == NULL || !PyTuple_Check(same) || PyTuple_Size(same) % 2) {
        PyErr_SetString(PyExc_TypeError, "expected a class, and names and values in turn");
        return NULL;
    }
    PyObject *block = make((PyTypeObject *)type, no_arguments, NULL);
    for (Py_ssize_t i = 0; block != NULL && i < PyTuple_Size(same); i += 2)
        if (PyObject_GenericSetAttr(block, PyTuple_GetItem(same, i), PyTuple_GetItem(same, i + 1)) < 0)
            Py_CLEAR(block);
    return block;
}

/* Where the fields of a usual block lie. */
typedef struct {
    int64_t numbers[NUMBERS];
    Py_ssize_t positions, position_bytes, token_ids, token_id_bytes, data;
} Layout;

/* Find the fields behind the first bytes; 0 where anything is unusual. */
static int layout(const uint8_t *value, Py_ssize_t end, Py_ssize_t at, Py_ssize_t token_bytes, Layout *found)
{
    Py_ssize_t data_bytes;
    if (at < 0 || at > end)
        return 0;
    for (int i = 0; i < NUMBERS; i++)
        if (!number(value, end, &at, &found->numbers[i]))
            return 0;
    if (!length(value, end, &at, &found->position_bytes))
        return 0;
    found->positions = at;
    at += found->position_bytes;
    if (!length(value, end, &at, &found->token_id_bytes))
        return 0;
    found->token_ids = at;
    at += found->token_id_bytes;
    if (!length(value, end, &at, &data_bytes) || at + data_bytes != end)
        return 0;
    found->data = at;
    Py_ssize_t tokens = found->position_bytes / 4;
    if (tokens == 0 || found->position_bytes % 4 || data_bytes % tokens || data_bytes / tokens != token_bytes ||
        (found->token_id_bytes != 0 && found->token_id_bytes != found->position_bytes))
        return 0;
    for (Py_ssize_t i = 3; i < found->position_bytes; i += 4)
        if (value[found->positions + i] & 0x80)
            return 0;
    return 1;
}

static PyObject *read_block(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    char *bytes;
    Py_ssize_t end;
    Layout at;
    (void)module;
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "expected (value, at, token_bytes, type, same)");
        return NULL;
    }
    if (PyBytes_AsStringAndSize(args[0], &bytes, &end) < 0)
        return NULL;
    Py_ssize_t first = PyLong_AsSsize_t(args[1]), token_bytes = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred())
        return NULL;
    if (!layout((const uint8_t *)bytes, end, first, token_bytes, &at))
        Py_RETURN_NONE;
    PyObject *block = made(args[3], args[4]);
    if (block == NULL)
        return NULL;
    for (int i = 0; i < NUMBERS; i++)
        if (set(block, number_names[i], PyLong_FromLongLong(at.numbers[i])) < 0)
            goto failed;
    if (set(block, positions_name, PyBytes_FromStringAndSize(bytes + at.positions, at.position_bytes)) < 0 ||
        set(block, token_ids_name, PyBytes_FromStringAndSize(bytes + at.token_ids, at.token_id_bytes)) < 0 ||
        set(block, data_name, rest_of(args[0], at.data)) < 0)
        goto failed;
    return block;
failed:
    Py_DECREF(block);
    return NULL;
}

/* A record of a stretch, and a stream's part of it. */
typedef struct {
    int32_t positions, tokens, data, next;
    PyObject *value; /* borrowed from the record, which its list holds */
} Row;

typedef struct {
    PyObject *prefix; /* borrowed from the list of those that are known */
    int64_t seq, revision;
    int32_t rows, tokens, first, last;
} Strand;

/* What is known of a record's stream: the first of its key's prefixes that its value begins with; NULL for none. */
static PyObject *prefix_of(PyObject *known, PyObject *key, const char *bytes, Py_ssize_t end, Py_ssize_t *at)
{
    PyObject *prefixes = PyDict_GetItemWithError(known, key);
    if (prefixes == NULL || !PyList_Check(prefixes))
        return NULL;
    for (Py_ssize_t i = 0; i < PyList_Size(prefixes); i++) {
        PyObject *prefix = PyList_GetItem(prefixes, i), *data;
        if (!PyTuple_Check(prefix) || PyTuple_Size(prefix) < 2 || !PyBytes_Check(data = PyTuple_GetItem(prefix, 0)))
            return NULL;
        *at = PyBytes_Size(data);
        if (*at <= end && memcmp(bytes, PyBytes_AsString(data), (size_t)*at) == 0)
            return prefix;
    }
    return NULL;
}

/* What has been read of a stretch; `table` finds the strands by their prefix and has room for twice as many. */
typedef struct {
    int32_t *table, count;
    size_t slots; /* a power of two */
    Strand *strands;
    Row *rows;
} Stretch;

static Strand *strand_of(Stretch *stretch, PyObject *prefix)
{
    size_t slot = (((uintptr_t)prefix >> 4) * 0x9E3779B97F4A7C15u) & (stretch->slots - 1);
    int32_t *table = stretch->table;
    while (table[slot] >= 0 && stretch->strands[table[slot]].prefix != prefix)
        slot = (slot + 1) & (stretch->slots - 1);
    if (table[slot] < 0) {
        table[slot] = stretch->count++;
        stretch->strands[table[slot]] = (Strand){.prefix = prefix};
    }
    return &stretch->strands[table[slot]];
}

/* Read one record; 0 where it does not go on with the stretch. */
static int take(Stretch *stretch, PyObject *record, PyObject *known, int64_t offset, int32_t place)
{
    Layout found;
    Py_ssize_t at;
    if (!PyTuple_Check(record) || PyTuple_Size(record) < 5)
        return 0;
    int64_t own = PyLong_AsLongLong(PyTuple_GetItem(record, 2));
    PyObject *value = PyTuple_GetItem(record, 4);
    if (PyErr_Occurred() || own != offset || !PyBytes_Check(value) || PyBytes_Size(value) > INT32_MAX)
        return 0;
    const char *bytes = PyBytes_AsString(value);
    PyObject *prefix = prefix_of(known, PyTuple_GetItem(record, 3), bytes, PyBytes_Size(value), &at);
    if (prefix == NULL)
        return 0;
    Py_ssize_t token_bytes = PyLong_AsSsize_t(PyTuple_GetItem(prefix, 1));
    if (PyErr_Occurred() || !layout((const uint8_t *)bytes, PyBytes_Size(value), at, token_bytes, &found))
        return 0;
    Strand *strand = strand_of(stretch, prefix);
    if (strand->rows == 0) {
        strand->seq = found.numbers[SEQ];
        strand->revision = found.numbers[REVISION];
    } else if ((uint64_t)found.numbers[SEQ] != (uint64_t)strand->seq + (uint64_t)strand->rows ||
               found.numbers[REVISION] != strand->revision) {
        return 0;
    }
    int32_t tokens = (int32_t)(found.position_bytes / 4);
    if (tokens > INT32_MAX / 4 - strand->tokens)
        return 0;
    if (strand->rows == 0)
        strand->first = place;
    else
        stretch->rows[strand->last].next = place;
    strand->last = place;
    strand->rows++;
    strand->tokens += tokens;
    stretch->rows[place] = (Row){(int32_t)found.positions, tokens, (int32_t)found.data, -1, value};
    return 1;
}

/* (prefix, values, numbers, starts, tokens, positions) of one strand; numbers to tokens are int32. */
static PyObject *made_strand(const Strand *strand, const Row *rows)
{
    enum { VALUES = 1, NUMBERS_, STARTS, TOKENS, POSITIONS, FIELDS };
    PyObject *fields = PyTuple_New(FIELDS);
    if (fields == NULL)
        return NULL;
    Py_INCREF(strand->prefix);
    PyTuple_SetItem(fields, 0, strand->prefix);
    PyObject *values = PyList_New(strand->rows);
    char *into[FIELDS];
    if (values == NULL || PyTuple_SetItem(fields, VALUES, values) < 0)
        goto failed;
    for (int field = NUMBERS_; field < FIELDS; field++) {
        PyObject *bytes = PyBytes_FromStringAndSize(NULL, 4 * (Py_ssize_t)(field == POSITIONS ? strand->tokens : strand->rows));
        if (bytes == NULL || PyTuple_SetItem(fields, field, bytes) < 0)
            goto failed;
        into[field] = PyBytes_AsString(bytes);
    }
    int32_t place = strand->first;
    for (Py_ssize_t at = 0; at < strand->rows; at++, place = rows[place].next) {
        const Row *row = &rows[place];
        Py_INCREF(row->value);
        PyList_SetItem(values, at, row->value);
        memcpy(into[NUMBERS_] + 4 * at, &place, 4);
        memcpy(into[STARTS] + 4 * at, &row->data, 4);
        memcpy(into[TOKENS] + 4 * at, &row->tokens, 4);
        memcpy(into[POSITIONS], PyBytes_AsString(row->value) + row->positions, 4 * (size_t)row->tokens);
        into[POSITIONS] += 4 * (size_t)row->tokens;
    }
    return fields;
failed:
    Py_DECREF(fields);
    return NULL;
}

static PyObject *read_strands(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    (void)module;
    if (given != 3 || !PyList_Check(args[0]) || !PyDict_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "expected (records, at, known)");
        return NULL;
    }
    Py_ssize_t at = PyLong_AsSsize_t(args[1]), count = 0, left = PyList_Size(args[0]) - at;
    if (PyErr_Occurred())
        return NULL;
    if (at < 0 || left < 0 || left > 1 << 24) {
        PyErr_SetString(PyExc_ValueError, "no place among the records");
        return NULL;
    }
    Stretch stretch = {.slots = 2};
    while (stretch.slots < 2 * (size_t)left)
        stretch.slots *= 2;
    stretch.table = PyMem_Malloc(stretch.slots * sizeof *stretch.table);
    stretch.strands = PyMem_Malloc(((size_t)left + 1) * sizeof *stretch.strands);
    stretch.rows = PyMem_Malloc(((size_t)left + 1) * sizeof *stretch.rows);
    PyObject *found = NULL, *result = NULL;
    if (stretch.table == NULL || stretch.strands == NULL || stretch.rows == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    memset(stretch.table, 0xFF, stretch.slots * sizeof *stretch.table);
    int64_t offset = 0;
    if (left > 0 && PyTuple_Check(PyList_GetItem(args[0], at)) && PyTuple_Size(PyList_GetItem(args[0], at)) > 2)
        offset = PyLong_AsLongLong(PyTuple_GetItem(PyList_GetItem(args[0], at), 2));
    while (count < left && !PyErr_Occurred() &&
           take(&stretch, PyList_GetItem(args[0], at + count), args[2], (int64_t)((uint64_t)offset + (uint64_t)count),
                (int32_t)count))
        count++;
    if (PyErr_Occurred())
        goto done;
    /* Whoever was met for the first time at the record that ended it has nothing here. */
    if (stretch.count > 0 && stretch.strands[stretch.count - 1].rows == 0)
        stretch.count--;
    found = PyList_New(stretch.count);
    for (int32_t i = 0; found != NULL && i < stretch.count; i++) {
        PyObject *one = made_strand(&stretch.strands[i], stretch.rows);
        if (one == NULL || PyList_SetItem(found, i, one) < 0)
            Py_CLEAR(found);
    }
    if (found != NULL)
        result = Py_BuildValue("nN", at + count, found);
done:
    PyMem_Free(stretch.table);
    PyMem_Free(stretch.strands);
    PyMem_Free(stretch.rows);
    return result;
}

enum { LONGEST = 10 };

/* Write an Avro long; return behind it. */
static char *put(char *at, int64_t value)
{
    uint64_t bits = ((uint64_t)value << 1) ^ (uint64_t)(value < 0 ? -1 : 0);
    for (; bits >= 0x80; bits >>= 7)
        *at++ = (char)(bits | 0x80);
    *at++ = (char)bits;
    return at;
}

static PyObject *encode(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    enum { PREFIX, SEQ_, REVISION_, STEP_, AT_, ARRAYS, ARGUMENTS = ARRAYS + 3 };
    (void)module;
    if (given != ARGUMENTS) {
        PyErr_SetString(PyExc_TypeError, "expected (prefix, seq, revision, step, captured_at_us, positions, token_ids, data)");
        return NULL;
    }
    char *prefix, head[NUMBERS * LONGEST], *at = head, *into;
    Py_ssize_t prefix_bytes, size;
    if (PyBytes_AsStringAndSize(args[PREFIX], &prefix, &prefix_bytes) < 0)
        return NULL;
    for (int i = SEQ_; i < ARRAYS; i++) {
        int64_t number = PyLong_AsLongLong(args[i]);
        if (PyErr_Occurred())
            return NULL;
        at = put(at, number);
    }
    Py_buffer arrays[3];
    PyObject *made = NULL;
    int held = 0;
    for (; held < 3; held++)
        if (PyObject_GetBuffer(args[ARRAYS + held], &arrays[held], PyBUF_SIMPLE) < 0)
            goto done;
    size = prefix_bytes + (at - head);
    for (int i = 0; i < 3; i++) {
        char length[LONGEST];
        size += put(length, arrays[i].len) - length + arrays[i].len;
    }
    made = PyBytes_FromStringAndSize(NULL, size);
    if (made == NULL)
        goto done;
    into = PyBytes_AsString(made);
    memcpy(into, prefix, (size_t)prefix_bytes);
    memcpy(into + prefix_bytes, head, (size_t)(at - head));
    into += prefix_bytes + (at - head);
    for (int i = 0; i < 3; i++) {
        into = put(into, arrays[i].len);
        if (arrays[i].len > 0)
            memcpy(into, arrays[i].buf, (size_t)arrays[i].len);
        into += arrays[i].len;
    }
done:
    while (held > 0)
        PyBuffer_Release(&arrays[--held]);
    return made;
}

static PyMethodDef methods[] = {
    {"encode", (PyCFunction)(void (*)(void))encode, METH_FASTCALL,
     "encode(prefix, seq, revision, step, captured_at_us, positions, token_ids, data): the bytes of a block."},
    {"strands", (PyCFunction)(void (*)(void))read_strands, METH_FASTCALL,
     "strands(records, at, known): where the stretch that begins at a record ends, and its blocks stream by stream."},
    {"read", (PyCFunction)(void (*)(void))read_block, METH_FASTCALL,
     "read(value, at, token_bytes, type, same): the block in a record's value, or None where anything is unusual."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_blocks", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__blocks(void)
{
    for (int i = 0; i < NUMBERS; i++)
        if (number_names[i] == NULL && (number_names[i] = PyUnicode_InternFromString(NUMBER_NAMES[i])) == NULL)
            return NULL;
    positions_name = PyUnicode_InternFromString("positions");
    token_ids_name = PyUnicode_InternFromString("token_ids");
    data_name = PyUnicode_InternFromString("data");
    no_arguments = PyTuple_New(0);
    if (positions_name == NULL || token_ids_name == NULL || data_name == NULL || no_arguments == NULL)
        return NULL;
    return PyModule_Create(&definition);
}
