/* The usual step of a capture in machine code: who is in the batch, which rows are wanted, and the rows into the ring.
 *
 * After a forward pass the caches hold none of our code, and every Python opcode costs a miss or several; this does one
 * step in one call. It knows the usual cases only, and says -1 for anything else: then it has changed nothing, and the
 * caller takes the way that knows them all. Nothing is shown, counted or written down before all of it has succeeded.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* As in `sides.py`, `frames.py` and `table.py`; `steady.py` compares them before it uses this. */
enum { HEAD = 8, TAIL = 16, STEPS = 25, HEARTBEAT = 26, FRAMES = 28 };
enum { NUMBER, START, STOP, STEP, EMITTED, LAST, ENDED, WATCH_FROM, WATCH_TO, BASE, FIELDS };
enum { DONE, SERIAL, REQUEST_FIELDS };
enum { NEXT_LANE, OPENED, COUNTERS };
#define FRAME_MAGIC 0x4D524655u
#define STEP_KIND 2u
#define PAD_KIND 0u
#define FRAME_HEAD 16
#define STEP_HEAD 40
#define ALIGNMENT 64
#define NO_TOKEN (-1)
#define MOST ((int64_t)1 << 40) /* of any size here: products of a size and a small number stay far from overflowing */

typedef struct {
    Py_buffer cells;    /* int64 [places, FIELDS] */
    Py_buffer lane;     /* int64 [2]: number and segments of the last frame */
    Py_buffer segments; /* uint32 [2 * places]: streams and rows of that frame */
    Py_buffer source;   /* the tap buffer's rows */
    /* Where a position counts from the end: rows that are kept, instead of sent, and their positions and token ids. */
    Py_buffer kept_positions, kept_tokens, kept_rows;
    int64_t row_bytes, source_bytes, max_rows, stop_token, depth;
    int encoded; /* what is sent is made of the rows by a function of Python's */
} Column;

typedef struct {
    PyObject *id; /* held, so that nothing else can come to lie at its address */
    int64_t place, serial;
} Slot;

typedef struct { /* what one stream gets of a step */
    int64_t place, first, stride, count, row, ended;
} Piece;

typedef struct { /* one frame of a step */
    int64_t first_piece, pieces, segments, rows, number;
    char *payload;
    int is_new;
} Part;

typedef struct {
    PyObject_HEAD
    Py_buffer words, data, requests, counters;
    PyObject *by_id;
    int64_t reserve;
    int busy; /* in `run`, which may call Python: whatever that does, it cannot come in again */
    Py_ssize_t column_count, slot_room, piece_room;
    Column *columns;
    Part *parts;
    Slot *slots;
    Piece *pieces;
} Stepper;

static void release(Py_buffer *view)
{
    if (view->obj != NULL)
        PyBuffer_Release(view);
    memset(view, 0, sizeof(*view));
}

static void drop_columns(Stepper *self)
{
    for (Py_ssize_t i = 0; i < self->column_count; i++) {
        release(&self->columns[i].cells);
        release(&self->columns[i].lane);
        release(&self->columns[i].segments);
        release(&self->columns[i].source);
        release(&self->columns[i].kept_positions);
        release(&self->columns[i].kept_tokens);
        release(&self->columns[i].kept_rows);
    }
    PyMem_Free(self->columns);
    PyMem_Free(self->parts);
    self->columns = NULL;
    self->parts = NULL;
    self->column_count = 0;
    release(&self->requests);
}

static void Stepper_dealloc(PyObject *object)
{
    Stepper *self = (Stepper *)object;
    PyTypeObject *type = Py_TYPE(object);
    drop_columns(self);
    for (Py_ssize_t i = 0; i < self->slot_room; i++)
        Py_XDECREF(self->slots[i].id);
    PyMem_Free(self->slots);
    PyMem_Free(self->pieces);
    release(&self->words);
    release(&self->data);
    release(&self->counters);
    Py_XDECREF(self->by_id);
    freefunc free_type = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_type(object);
    Py_DECREF(type);
}

/* Stepper(words, data, reserve, by_id, counters) */
static PyObject *Stepper_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *words, *data, *by_id, *counters;
    long long reserve;
    if (!PyArg_ParseTuple(args, "OOLO!O", &words, &data, &reserve, &PyDict_Type, &by_id, &counters))
        return NULL;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Stepper *self = (Stepper *)alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->reserve = reserve;
    Py_INCREF(by_id);
    self->by_id = by_id;
    if (PyObject_GetBuffer(words, &self->words, PyBUF_WRITABLE) < 0 ||
        PyObject_GetBuffer(data, &self->data, PyBUF_WRITABLE) < 0 ||
        PyObject_GetBuffer(counters, &self->counters, PyBUF_WRITABLE) < 0)
        goto fail;
    if (self->words.len < 8 * 64 || self->counters.len != 8 * COUNTERS || self->data.len < ALIGNMENT ||
        self->data.len % ALIGNMENT != 0 || reserve < 0 || reserve > self->data.len) {
        PyErr_SetString(PyExc_ValueError, "a ring's sizes do not fit together");
        goto fail;
    }
    return (PyObject *)self;
fail:
    Py_DECREF(self);
    return NULL;
}

static int take_kept(Column *column, PyObject *kept)
{
    PyObject *positions, *tokens, *rows;
    long long depth;
    if (!PyArg_ParseTuple(kept, "LOOO", &depth, &positions, &tokens, &rows))
        return -1;
    if (PyObject_GetBuffer(positions, &column->kept_positions, PyBUF_WRITABLE) < 0 ||
        PyObject_GetBuffer(tokens, &column->kept_tokens, PyBUF_WRITABLE) < 0 ||
        PyObject_GetBuffer(rows, &column->kept_rows, PyBUF_WRITABLE) < 0)
        return -1;
    column->depth = depth;
    const int64_t places = column->kept_positions.len / 8;
    if (depth < 1 || depth > MOST || column->kept_positions.len != 8 * places ||
        column->kept_tokens.len != 4 * places || column->kept_rows.len / column->source_bytes != places ||
        column->kept_rows.len % column->source_bytes != 0) {
        PyErr_SetString(PyExc_ValueError, "the sizes of kept rows do not fit together");
        return -1;
    }
    return 0;
}

static int take_column(Column *column, PyObject *described, Py_ssize_t places)
{
    PyObject *cells, *lane, *segments, *source, *kept;
    long long row_bytes, source_bytes, max_rows, stop_token;
    if (!PyArg_ParseTuple(described, "OOOOLLLLpO", &cells, &lane, &segments, &source, &row_bytes, &source_bytes,
                          &max_rows, &stop_token, &column->encoded, &kept))
        return -1;
    if (PyObject_GetBuffer(cells, &column->cells, PyBUF_WRITABLE) < 0 ||
        PyObject_GetBuffer(lane, &column->lane, PyBUF_WRITABLE) < 0 ||
        PyObject_GetBuffer(segments, &column->segments, PyBUF_WRITABLE) < 0 ||
        PyObject_GetBuffer(source, &column->source, PyBUF_SIMPLE) < 0)
        return -1;
    column->row_bytes = row_bytes;
    column->source_bytes = source_bytes;
    column->max_rows = max_rows;
    column->stop_token = stop_token;
    if (row_bytes < 1 || row_bytes > MOST || source_bytes < 1 || source_bytes > MOST || max_rows < 1 ||
        max_rows > MOST || (!column->encoded && row_bytes != source_bytes) || column->lane.len != 16 ||
        column->cells.len != places * FIELDS * 8 || column->segments.len != places * 8) {
        PyErr_SetString(PyExc_ValueError, "a column's sizes do not fit together");
        return -1;
    }
    return kept == Py_None ? 0 : take_kept(column, kept);
}

static int is_busy(const Stepper *self)
{
    if (self->busy)
        PyErr_SetString(PyExc_RuntimeError, "a step is being written");
    return self->busy;
}

/* use(requests, columns): the arrays as they are now */
static PyObject *Stepper_use(PyObject *object, PyObject *args)
{
    Stepper *self = (Stepper *)object;
    PyObject *requests, *columns;
    if (!PyArg_ParseTuple(args, "OO!", &requests, &PyTuple_Type, &columns))
        return NULL;
    if (is_busy(self))
        return NULL;
    drop_columns(self);
    const Py_ssize_t count = PyTuple_Size(columns);
    self->columns = PyMem_Calloc(count ? count : 1, sizeof(Column));
    self->parts = PyMem_Calloc(count ? count : 1, sizeof(Part));
    if (self->columns == NULL || self->parts == NULL) {
        PyErr_NoMemory();
        goto fail;
    }
    if (PyObject_GetBuffer(requests, &self->requests, PyBUF_WRITABLE) < 0)
        goto fail;
    if (self->requests.len % (8 * REQUEST_FIELDS) != 0) {
        PyErr_SetString(PyExc_ValueError, "a table's sizes do not fit together");
        goto fail;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        self->column_count = i + 1;
        if (take_column(&self->columns[i], PyTuple_GetItem(columns, i), self->requests.len / (8 * REQUEST_FIELDS)) < 0)
            goto fail;
    }
    Py_RETURN_NONE;
fail:
    drop_columns(self);
    return NULL;
}

static int make_room(Stepper *self, Py_ssize_t slots)
{
    if (slots > self->slot_room) {
        Slot *more = PyMem_Realloc(self->slots, slots * sizeof(Slot));
        if (more == NULL)
            goto no_memory;
        memset(more + self->slot_room, 0, (slots - self->slot_room) * sizeof(Slot));
        self->slots = more;
        self->slot_room = slots;
    }
    if (slots * self->column_count > self->piece_room) {
        Piece *more = PyMem_Realloc(self->pieces, slots * self->column_count * sizeof(Piece));
        if (more == NULL)
            goto no_memory;
        self->pieces = more;
        self->piece_room = slots * self->column_count;
    }
    return 0;
no_memory:
    PyErr_NoMemory();
    return -1;
}

/* Look every slot's request up that is not the one of the last step; 0, or -1 with an error. */
static int find_places(Stepper *self, PyObject *ids, Py_ssize_t count)
{
    const int64_t *requests = self->requests.buf, opened = ((const int64_t *)self->counters.buf)[OPENED];
    const int64_t places = self->requests.len / (8 * REQUEST_FIELDS);
    for (Py_ssize_t i = 0; i < count; i++) {
        Slot *slot = &self->slots[i];
        PyObject *id = PyList_GetItem(ids, i);
        if (id == NULL)
            return -1;
        if (id == slot->id && slot->place < places &&
            slot->serial == (slot->place < 0 ? opened : requests[REQUEST_FIELDS * slot->place + SERIAL]))
            continue;
        Py_INCREF(id); /* before anything that may change the list */
        PyObject *found = PyDict_GetItemWithError(self->by_id, id), *before = slot->id;
        const int64_t place = found == NULL ? -1 : PyLong_AsLongLong(found);
        if (!PyErr_Occurred() && (place < -1 || place >= places))
            PyErr_SetString(PyExc_ValueError, "a request has a place that does not exist");
        if (PyErr_Occurred()) {
            Py_DECREF(id);
            return -1;
        }
        *slot = (Slot){id, place, place < 0 ? opened : requests[REQUEST_FIELDS * place + SERIAL]};
        Py_XDECREF(before);
    }
    return 0;
}

/* Whether the batch is one of those that this knows: arrays that fit, and requests that go on where they were. */
static int is_usual(Stepper *self, Py_ssize_t count, int64_t rows, const int32_t *computed, const int32_t *starts)
{
    const int64_t *requests = self->requests.buf;
    if (starts[0] != 0 || starts[count] != rows)
        return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        const int64_t place = self->slots[i].place;
        if (starts[i + 1] < starts[i] || computed[i] < 0)
            return 0;
        if (place >= 0 && requests[REQUEST_FIELDS * place + DONE] != computed[i])
            return 0;
    }
    for (Py_ssize_t i = 0; i < self->column_count; i++)
        if (rows > self->columns[i].source.len / self->columns[i].source_bytes)
            return 0;
    return 1;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* Find what a column's streams get; 0 where this does not know how. */
static int choose(Stepper *self, Column *column, Part *part, Py_ssize_t count, const int32_t *computed,
                  const int32_t *starts, const int32_t *tokens)
{
    part->pieces = part->segments = part->rows = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        const int64_t place = self->slots[i].place;
        if (place < 0)
            continue;
        const int64_t *cell = (const int64_t *)column->cells.buf + FIELDS * place;
        if (cell[NUMBER] <= 0 || cell[ENDED] >= 0)
            continue;
        const int64_t low = computed[i], row = starts[i], stride = cell[STEP], end = low + starts[i + 1] - row;
        int64_t high = least(end, cell[STOP]), ended = -1, first = cell[START];
        if (stride < 1 || stride > MOST || first > MOST || first < (column->depth > 0 ? -MOST : 0) ||
            cell[NUMBER] > UINT32_MAX || end > INT32_MAX)
            return 0;
        if (column->stop_token != NO_TOKEN) {
            const int64_t to = least(end, cell[WATCH_TO]);
            for (int64_t at = most(low, cell[WATCH_FROM]); at < to; at++)
                if (tokens[row + at - low] == column->stop_token) {
                    ended = at;
                    high = least(high, at + 1);
                    break;
                }
        }
        if (low > first)
            first += (low - first + stride - 1) / stride * stride;
        if (column->depth > 0) {
            const int64_t base = cell[BASE];
            if (stride != 1 || base < 0 || base > column->kept_positions.len / 8 - column->depth)
                return 0;
            first = most(first, end - column->depth);
        }
        const int64_t wanted = high > first ? (high - first + stride - 1) / stride : 0;
        if (wanted == 0 && ended < 0)
            continue;
        self->pieces[part->first_piece + part->pieces++] =
            (Piece){place, first, stride, wanted, row + (first - low), ended};
        part->segments += wanted > 0;
        part->rows += wanted;
    }
    return column->depth > 0 || (part->rows <= column->max_rows && part->segments <= column->segments.len / 8 &&
                                 part->rows <= self->data.len / column->row_bytes);
}

static int64_t data_at(const Part *part)
{
    const int64_t end = FRAME_HEAD + STEP_HEAD + 8 * part->segments + 8 * part->rows;
    return ((end + ALIGNMENT - 1) & -(int64_t)ALIGNMENT) - FRAME_HEAD;
}

/* Return where the payload of a frame begins, or NULL if `reserve` bytes would not stay free; writes the frame's head. */
static char *put_frame(Stepper *self, int64_t *cursor, int64_t tail, int64_t size)
{
    const int64_t capacity = self->data.len, total = (FRAME_HEAD + size + ALIGNMENT - 1) & -(int64_t)ALIGNMENT;
    int64_t start = *cursor % capacity, rest = capacity - start, need = total <= rest ? total : rest + total;
    char *data = self->data.buf;
    if (total > capacity || *cursor + need - tail > capacity - self->reserve)
        return NULL;
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
    return data + start + FRAME_HEAD;
}

/* Let Python make what is sent of a frame's rows; -1 with an error. */
static int encode_rows(Stepper *self, Py_ssize_t index, Part *part, int64_t at, PyObject *encode)
{
    PyObject *rows = PyBytes_FromStringAndSize(NULL, 8 * part->rows);
    if (rows == NULL)
        return -1;
    int64_t *to = (int64_t *)PyBytes_AsString(rows);
    for (int64_t n = 0; n < part->pieces; n++) {
        const Piece *piece = &self->pieces[part->first_piece + n];
        for (int64_t k = 0; k < piece->count; k++)
            *to++ = piece->row + k * piece->stride;
    }
    PyObject *done = PyObject_CallFunction(encode, "nLO", index, (long long)at, rows);
    Py_DECREF(rows);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Keep the rows of a step that a position from the end may mean. */
static void keep(Stepper *self, Column *column, const Part *part, const int32_t *tokens)
{
    int64_t *positions = column->kept_positions.buf;
    int32_t *ids = column->kept_tokens.buf;
    const int64_t size = column->source_bytes;
    for (int64_t n = 0; n < part->pieces; n++) {
        const Piece *piece = &self->pieces[part->first_piece + n];
        const int64_t base = ((const int64_t *)column->cells.buf)[FIELDS * piece->place + BASE];
        for (int64_t k = 0; k < piece->count; k++) {
            const int64_t position = piece->first + k, at = base + position % column->depth;
            positions[at] = position;
            ids[at] = tokens[piece->row + k];
            memcpy((char *)column->kept_rows.buf + at * size, (char *)column->source.buf + (piece->row + k) * size, size);
        }
    }
}

static void fill(Stepper *self, Column *column, Part *part, int64_t *next_lane, int64_t step, int64_t now_us,
                 const int32_t *tokens)
{
    char *to = part->payload, *source = column->source.buf;
    uint32_t *streams = (uint32_t *)(to + STEP_HEAD), *counts = streams + part->segments;
    int32_t *positions = (int32_t *)(counts + part->segments), *ids = positions + part->rows;
    const int64_t offset = data_at(part), *cells = column->cells.buf, *lane = column->lane.buf;
    const int64_t row_bytes = column->row_bytes;
    char *rows_to = to + offset;
    int64_t run = 0, run_end = 0; /* rows that lie together are copied together */
    for (int64_t n = 0; n < part->pieces; n++) {
        const Piece *piece = &self->pieces[part->first_piece + n];
        if (piece->count == 0)
            continue;
        *streams++ = (uint32_t)cells[FIELDS * piece->place + NUMBER];
        *counts++ = (uint32_t)piece->count;
        for (int64_t k = 0, row = piece->row; k < piece->count; k++, row += piece->stride) {
            *positions++ = (int32_t)(piece->first + k * piece->stride);
            *ids++ = tokens[row];
            if (row != run_end && !column->encoded) {
                memcpy(rows_to, source + run * row_bytes, (run_end - run) * row_bytes);
                rows_to += (run_end - run) * row_bytes;
                run = row;
            }
            run_end = row + 1;
        }
    }
    if (!column->encoded)
        memcpy(rows_to, source + run * row_bytes, (run_end - run) * row_bytes);
    memset(ids, 0, to + offset - (char *)ids);
    part->is_new = lane[1] != part->segments || memcmp(to + STEP_HEAD, column->segments.buf, 8 * part->segments) != 0;
    part->number = part->is_new ? (*next_lane)++ : lane[0];
    const uint64_t stamp[3] = {(uint64_t)step, (uint64_t)now_us, (uint64_t)part->number};
    const uint32_t sizes[4] = {(uint32_t)part->rows, (uint32_t)part->segments, (uint32_t)row_bytes, (uint32_t)offset};
    memcpy(to, stamp, 24);
    memcpy(to + 24, sizes, 16);
}

/* Return what `Table.log` wants to know of the step. */
static PyObject *log_entry(Stepper *self, Py_ssize_t count, int64_t rows, const int32_t *starts, const int32_t *tokens)
{
    PyObject *entry = PyBytes_FromStringAndSize(NULL, 4 * (1 + 2 * count + rows));
    if (entry == NULL)
        return NULL;
    int32_t *to = (int32_t *)PyBytes_AsString(entry);
    *to++ = (int32_t)count;
    for (Py_ssize_t i = 0; i < count; i++) {
        to[i] = (int32_t)self->slots[i].place;
        to[count + i] = starts[i + 1] - starts[i];
    }
    memcpy(to + 2 * count, tokens, 4 * rows);
    return entry;
}

/* Count a step whose frames all lie in the ring, and show them; nothing here can fail. */
static void commit(Stepper *self, Py_ssize_t count, int64_t cursor, int64_t next_lane, int64_t step, int64_t now_us,
                   const int32_t *computed, const int32_t *starts, const int32_t *tokens)
{
    int64_t *words = self->words.buf, *requests = self->requests.buf, frames = 0;
    for (Py_ssize_t i = 0; i < self->column_count; i++) {
        Column *column = &self->columns[i];
        Part *part = &self->parts[i];
        int64_t *cells = column->cells.buf, *lane = column->lane.buf;
        for (int64_t n = 0; n < part->pieces; n++) {
            const Piece *piece = &self->pieces[part->first_piece + n];
            int64_t *cell = cells + FIELDS * piece->place;
            if (piece->count > 0 && column->depth == 0) {
                cell[EMITTED] += piece->count;
                cell[LAST] = most(cell[LAST], piece->first + (piece->count - 1) * piece->stride);
            }
            if (piece->ended >= 0)
                cell[ENDED] = piece->ended;
        }
        if (column->depth > 0)
            keep(self, column, part, tokens);
        if (part->rows == 0 || column->depth > 0)
            continue;
        frames++;
        if (part->is_new) {
            lane[0] = part->number;
            lane[1] = part->segments;
            memcpy(column->segments.buf, part->payload + STEP_HEAD, 8 * part->segments);
        }
    }
    for (Py_ssize_t i = 0; i < count; i++)
        if (self->slots[i].place >= 0)
            requests[REQUEST_FIELDS * self->slots[i].place + DONE] = (int64_t)computed[i] + starts[i + 1] - starts[i];
    ((int64_t *)self->counters.buf)[NEXT_LANE] = next_lane;
    words[STEPS] = step;
    words[HEARTBEAT] = now_us;
    words[FRAMES] += frames;
    __atomic_store_n(&words[HEAD], cursor, __ATOMIC_RELEASE);
}

/* Write a step; return the ring's new head, -1 where another way must be taken, -2 with an error. */
static int64_t write_step(Stepper *self, Py_ssize_t count, int64_t rows, int64_t step, int64_t now_us,
                          const int32_t *computed, const int32_t *starts, const int32_t *tokens, PyObject *log,
                          PyObject *encode)
{
    int64_t *words = self->words.buf, cursor = words[HEAD];
    const int64_t tail = __atomic_load_n(&words[TAIL], __ATOMIC_ACQUIRE);
    int64_t next_lane = ((const int64_t *)self->counters.buf)[NEXT_LANE], pieces = 0;
    /* Another process can write there too. */
    if (tail < 0 || tail > cursor || cursor % ALIGNMENT != 0 || cursor > INT64_MAX / 2)
        return -1;
    for (Py_ssize_t i = 0; i < self->column_count; i++) {
        Column *column = &self->columns[i];
        Part *part = &self->parts[i];
        part->first_piece = pieces;
        if (!choose(self, column, part, count, computed, starts, tokens))
            return -1;
        pieces += part->pieces;
        if (part->rows == 0 || column->depth > 0)
            continue;
        part->payload = put_frame(self, &cursor, tail, data_at(part) + part->rows * column->row_bytes);
        if (part->payload == NULL)
            return -1;
        fill(self, column, part, &next_lane, step, now_us, tokens);
    }
    for (Py_ssize_t i = 0; i < self->column_count; i++) {
        Part *part = &self->parts[i];
        if (!self->columns[i].encoded || part->rows == 0 || self->columns[i].depth > 0)
            continue;
        if (encode_rows(self, i, part, part->payload - (char *)self->data.buf + data_at(part), encode) < 0)
            return -2;
    }
    PyObject *entry = log_entry(self, count, rows, starts, tokens);
    if (entry == NULL)
        return -2;
    const int failed = PyList_Append(log, entry) < 0;
    Py_DECREF(entry);
    if (failed)
        return -2;
    commit(self, count, cursor, next_lane, step, now_us, computed, starts, tokens);
    return cursor;
}

/* run(step, rows, now_us, engine_ids, computed, starts, token_ids, log, encode) -> new head of the ring, or -1 */
static PyObject *Stepper_run(PyObject *object, PyObject *args)
{
    Stepper *self = (Stepper *)object;
    long long step, rows, now_us;
    PyObject *ids, *computed_object, *starts_object, *tokens_object, *log, *encode;
    if (!PyArg_ParseTuple(args, "LLLOOOOO!O", &step, &rows, &now_us, &ids, &computed_object, &starts_object,
                          &tokens_object, &PyList_Type, &log, &encode))
        return NULL;
    if (is_busy(self))
        return NULL;
    if (self->columns == NULL) {
        PyErr_SetString(PyExc_ValueError, "nobody has said where the columns are");
        return NULL;
    }
    if (!PyList_Check(ids))
        return PyLong_FromLong(-1);
    Py_buffer computed = {0}, starts = {0}, tokens = {0};
    PyObject *result = NULL;
    const Py_ssize_t count = PyList_Size(ids);
    int64_t cursor = -1;
    self->busy = 1;
    if (PyObject_GetBuffer(computed_object, &computed, PyBUF_SIMPLE) < 0 ||
        PyObject_GetBuffer(starts_object, &starts, PyBUF_SIMPLE) < 0 ||
        PyObject_GetBuffer(tokens_object, &tokens, PyBUF_SIMPLE) < 0)
        goto done;
    if (rows >= 0 && rows <= tokens.len / 4 && count <= computed.len / 4 && count < starts.len / 4) {
        if (make_room(self, count) < 0 || find_places(self, ids, count) < 0)
            goto done;
        if (is_usual(self, count, rows, computed.buf, starts.buf))
            cursor = write_step(self, count, rows, step, now_us, computed.buf, starts.buf, tokens.buf, log, encode);
    }
    if (cursor != -2)
        result = PyLong_FromLongLong(cursor);
done:
    self->busy = 0;
    release(&computed);
    release(&starts);
    release(&tokens);
    return result;
}

static PyMethodDef methods[] = {
    {"use", Stepper_use, METH_VARARGS, "Take the arrays as they are now."},
    {"run", Stepper_run, METH_VARARGS, "Write one step; return the ring's new head, -1 where another way must be taken."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_doc, "See `steady.py`."},
    {Py_tp_new, Stepper_new},
    {Py_tp_dealloc, Stepper_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};
static PyType_Spec spec = {"undercurrent.capture._steady.Stepper", sizeof(Stepper), 0, Py_TPFLAGS_DEFAULT, slots};

static int fill_module(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&spec);
    if (type == NULL || PyModule_AddObjectRef(module, "Stepper", type) < 0) {
        Py_XDECREF(type);
        return -1;
    }
    Py_DECREF(type);
    const int layout[] = {HEAD,       TAIL,      STEPS, HEARTBEAT, FRAMES, FRAME_HEAD, ALIGNMENT, STEP_HEAD,
                          NUMBER,     START,     STOP,  STEP,      EMITTED, LAST,      ENDED,     WATCH_FROM,
                          WATCH_TO,   BASE,      FIELDS, DONE,     SERIAL, NEXT_LANE,  OPENED};
    const Py_ssize_t count = sizeof(layout) / sizeof(*layout);
    PyObject *values = PyTuple_New(count);
    for (Py_ssize_t i = 0; values != NULL && i < count; i++) {
        PyObject *value = PyLong_FromLong(layout[i]);
        if (value == NULL || PyTuple_SetItem(values, i, value) < 0)
            Py_CLEAR(values);
    }
    const int failed = values == NULL || PyModule_AddObjectRef(module, "LAYOUT", values) < 0;
    Py_XDECREF(values);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, fill_module}, {0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_steady", NULL, 0, NULL, module_slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__steady(void)
{
    return PyModuleDef_Init(&module);
}
