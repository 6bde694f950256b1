/* Runs a step that is one graph, with inputs like those of an earlier step and one tensor as output:
   what StepExecutor.run of graphrt/core/runner/executor.py does in Python. Every other step it leaves
   to Python before it has done anything. */
#include "native.h"

/* Its parts, from PreparedStep.hold. `SHELL`, of the class `SHELLS`, hands out the output, and `OUT`
   is the pool's list of shells that the last step used: see graphrt/core/replay/handout.py. */
enum {
    ENTRY, POOL, PIECES, STREAMS, RING, FETCH, GRAPH, STREAM, MOVES, KNOWN, SHAPES,
    SHELL, SHELLS, OUT, USE_COUNT, WEAKREFS, IS_INFERENCE, PARTS
};

typedef struct {
    HOLDER_HEAD
    Py_ssize_t count;
    Py_ssize_t entry_graph, compares_next, closed, replaying, last_id, generation, alike;
    Py_ssize_t pending, ring_count, unsure;
    /* Slots of a shell; `own` is what _own_references in handout.py returns. */
    Py_ssize_t storage, cdata, alone, references, left, address, bases;
    long own;
} Replay;

static PyObject *name_replay, *name_give_up, *name_anew, *name_data, *name_data_ptr, *name_dict;

static int is_equal(PyObject *one, PyObject *other) {
    return one == NULL || other == NULL ? 0 : PyObject_RichCompareBool(one, other, Py_EQ);
}

/* As Shell.is_held: 1, 0, or -1 with an error set. */
static int is_held(const Replay *self, PyObject *shell) {
    PyObject *storage = in_slot(shell, self->storage);
    if (storage == NULL || storage == Py_None) return 0;
    if (add_to_slot(shell, self->left, -1) < 0) return -1;
    long references = PyLong_AsLong(in_slot(shell, self->references));
    long left = PyLong_AsLong(in_slot(shell, self->left));
    if (PyErr_Occurred()) return -1;
    /* When Python counted the references, `own` of them were of the counting itself. */
    if (left < 0 || (long)Py_REFCNT(storage) != references - self->own) return 1;
    Py_INCREF(storage);
    int held = -1;
    PyObject *uses = PyObject_CallOneArg(self->of[USE_COUNT], in_slot(shell, self->cdata));
    PyObject *address = uses ? PyObject_CallMethodNoArgs(storage, name_data_ptr) : NULL;
    PyObject *attributes = address ? PyObject_GetAttr(storage, name_dict) : NULL;
    PyObject *watched = attributes ? PyObject_CallOneArg(self->of[WEAKREFS], storage) : NULL;
    if (watched != NULL) {
        int same = is_equal(uses, in_slot(shell, self->alone));
        int there = same <= 0 ? same : is_equal(address, in_slot(shell, self->address));
        int bare = there <= 0 ? there : !PyObject_IsTrue(attributes) && !PyObject_IsTrue(watched);
        held = bare < 0 ? -1 : !bare;
    }
    Py_XDECREF(uses);
    Py_XDECREF(address);
    Py_XDECREF(attributes);
    Py_XDECREF(watched);
    Py_DECREF(storage);
    return held;
}

/* As expire. */
static int expire(const Replay *self) {
    for (Py_ssize_t each = 0; each < PyList_GET_SIZE(self->of[OUT]); each++) {
        PyObject *shell = Py_NewRef(PyList_GET_ITEM(self->of[OUT], each));
        int held = -1;
        if (PyObject_TypeCheck(shell, (PyTypeObject *)self->of[SHELLS]))
            held = is_held(self, shell);
        else
            PyErr_SetString(PyExc_TypeError, "outputs are handed out by shells");
        PyObject *gone = held > 0 ? PyObject_CallMethodNoArgs(shell, name_give_up) : NULL;
        Py_DECREF(shell);
        if (held < 0 || (held > 0 && gone == NULL)) return -1;
        Py_XDECREF(gone);
    }
    return PyList_SetSlice(self->of[OUT], 0, PyList_GET_SIZE(self->of[OUT]), NULL);
}

/* As Shell.hand_out. */
static PyObject *hand_out(const Replay *self, PyObject *shell, PyObject *shape) {
    if (PyList_Append(self->of[OUT], shell) < 0) return NULL;
    PyObject *inference = PyObject_CallNoArgs(self->of[IS_INFERENCE]);
    if (inference == NULL) return NULL;
    PyObject *bases = in_slot(shell, self->bases), *base = NULL;
    if (bases != NULL && PyTuple_CheckExact(bases) && PyTuple_GET_SIZE(bases) == 2) {
        PyObject *known = PyTuple_GET_ITEM(bases, inference == Py_True);
        if (PyDict_CheckExact(known)) base = PyDict_GetItemWithError(known, shape);
    }
    Py_DECREF(inference);
    if (base == NULL) {
        if (PyErr_Occurred()) return NULL;
        return PyObject_CallMethodOneArg(shell, name_anew, shape);
    }
    Py_INCREF(base);
    PyObject *fresh = PyObject_GetAttr(base, name_data);
    Py_DECREF(base);
    return fresh;
}

/* What a dict has for a key, owned: NULL with an error set, or without one where it has nothing. */
static PyObject *known_in(PyObject *dict, PyObject *key) {
    return Py_XNewRef(PyDict_GetItemWithError(dict, key));
}

/* What earlier steps with as many tokens and requests have left, owned: the moves and the output's
   live shape. 1, or 0 where there is none, or -1 with an error. */
static int look_up(const Replay *self, PyObject *batch, PyObject **moves, PyObject **shape) {
    PyObject *key = PyTuple_GetSlice(batch, 0, 2), *shapes = NULL;
    if (key == NULL) return -1;
    *moves = known_in(self->of[KNOWN], key);
    if (*moves != NULL) shapes = known_in(self->of[SHAPES], key);
    Py_DECREF(key);
    if (shapes != NULL && PyList_CheckExact(shapes) && PyList_GET_SIZE(shapes) == 1 &&
        PyTuple_CheckExact(PyList_GET_ITEM(shapes, 0)) &&
        (PyObject *)Py_TYPE(*moves) == self->of[MOVES])
        *shape = Py_NewRef(PyList_GET_ITEM(shapes, 0));
    Py_XDECREF(shapes);
    if (*shape != NULL) return 1;
    Py_CLEAR(*moves);
    return PyErr_Occurred() ? -1 : 0;
}

/* Whether the entry may be replayed. The caller has the pool's turn. */
static int is_usable(const Replay *self) {
    PyObject *pool = self->of[POOL];
    return in_slot(self->of[ENTRY], self->entry_graph) == self->of[GRAPH] &&
           in_slot(self->of[ENTRY], self->compares_next) == Py_False &&
           in_slot(pool, self->closed) == Py_False &&
           in_slot(self->of[PIECES], self->replaying) == Py_None;
}

/* Whether the stream is the one that the pool's last step ran on, or there are none: 1, 0 or -1. */
static int is_same_stream(const Replay *self) {
    if (self->of[STREAM] == Py_None) return 1;
    PyObject *stream = PyObject_CallNoArgs(self->of[STREAM]);
    if (stream == NULL) return -1;
    int same = is_equal(stream, in_slot(self->of[STREAMS], self->last_id));
    Py_DECREF(stream);
    return same;
}

/* The outputs; NULL with an error set, or without one where Python has to do the step. */
static PyObject *run(Replay *self, PyObject *moves, PyObject *shape, PyObject *values) {
    PyObject *pool = self->of[POOL], *ring = self->of[RING];
    if (is_same_stream(self) <= 0) return NULL;
    PyObject *alike = in_slot(moves, self->alike);
    if (alike == NULL || alike == Py_None) return NULL;
    PyObject *arguments[] = {values, self->of[FETCH], Py_True};
    Py_INCREF(alike);
    PyObject *written = PyObject_Vectorcall(alike, arguments, 3, NULL);
    Py_DECREF(alike);
    Py_XDECREF(written);
    if (written != Py_True) return NULL;
    /* After the inputs are read: the last step's outputs may be among them. */
    if (PyList_GET_SIZE(self->of[OUT]) && expire(self) < 0) return NULL;
    if (add_to_slot(pool, self->generation, 1) < 0) return NULL;
    PyObject *launched = PyObject_CallMethodNoArgs(self->of[GRAPH], name_replay);
    if (launched == NULL) return NULL;
    Py_DECREF(launched);
    set_slot(ring, self->pending, Py_None);
    if (add_to_slot(ring, self->ring_count, 1) < 0) return NULL;
    set_slot(ring, self->unsure, Py_False);
    return hand_out(self, self->of[SHELL], shape);
}

PyObject *replay_step(PyObject *replay, PyObject *batch, PyObject *values) {
    Replay *self = (Replay *)replay;
    PyObject *moves = NULL, *shape = NULL, *outputs = NULL;
    if (!PyDict_CheckExact(values) || PyDict_GET_SIZE(values) != self->count) return NULL;
    if (look_up(self, batch, &moves, &shape) <= 0) return NULL;
    if (is_usable(self)) outputs = run(self, moves, shape, values);
    Py_DECREF(moves);
    Py_DECREF(shape);
    return outputs;
}

int prepare_replay(void) {
    struct {
        PyObject **into;
        const char *text;
    } names[] = {{&name_replay, "replay"}, {&name_give_up, "give_up"},
                 {&name_anew, "_anew"},    {&name_data, "data"},
                 {&name_data_ptr, "data_ptr"}, {&name_dict, "__dict__"}};
    for (size_t each = 0; each < COUNT(names); each++) {
        *names[each].into = PyUnicode_InternFromString(names[each].text);
        if (*names[each].into == NULL) return -1;
    }
    return 0;
}

static int find_all(Replay *self) {
    const Slot slots[] = {
        {Py_TYPE(self->of[ENTRY]), "graph", &self->entry_graph},
        {Py_TYPE(self->of[ENTRY]), "compares_next", &self->compares_next},
        {Py_TYPE(self->of[POOL]), "closed", &self->closed},
        {Py_TYPE(self->of[PIECES]), "replaying", &self->replaying},
        {Py_TYPE(self->of[STREAMS]), "last_id", &self->last_id},
        {Py_TYPE(self->of[POOL]), "generation", &self->generation},
        {self->of[MOVES], "alike", &self->alike},
        {Py_TYPE(self->of[RING]), "pending", &self->pending},
        {Py_TYPE(self->of[RING]), "count", &self->ring_count},
        {Py_TYPE(self->of[RING]), "unsure", &self->unsure},
        {self->of[SHELLS], "_storage", &self->storage},
        {self->of[SHELLS], "_cdata", &self->cdata},
        {self->of[SHELLS], "_alone", &self->alone},
        {self->of[SHELLS], "_references", &self->references},
        {self->of[SHELLS], "_left", &self->left},
        {self->of[SHELLS], "_address", &self->address},
        {self->of[SHELLS], "_bases", &self->bases},
    };
    return find_slots(slots, COUNT(slots));
}

static PyObject *replay_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"entry", "pool",   "pieces", "streams", "ring",
                               "fetch", "graph",  "stream", "count",   "moves",
                               "known", "shapes", "outputs", NULL};
    PyObject *of[PARTS];
    Py_ssize_t count;
    long own;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OOOOOOOOnO!O!O!(OO!O!OOOl)", keywords, &of[ENTRY], &of[POOL],
            &of[PIECES], &of[STREAMS], &of[RING], &of[FETCH], &of[GRAPH], &of[STREAM], &count, &PyType_Type, &of[MOVES],
            &PyDict_Type, &of[KNOWN], &PyDict_Type, &of[SHAPES], &of[SHELL], &PyType_Type,
            &of[SHELLS], &PyList_Type, &of[OUT], &of[USE_COUNT], &of[WEAKREFS], &of[IS_INFERENCE],
            &own))
        return NULL;
    if (!PyObject_TypeCheck(of[SHELL], (PyTypeObject *)of[SHELLS])) {
        PyErr_SetString(PyExc_ValueError, "outputs are handed out by a shell");
        return NULL;
    }
    Replay *self = (Replay *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    for (int each = 0; each < PARTS; each++) self->of[each] = Py_NewRef(of[each]);
    self->own = own;
    self->count = count;
    if (find_all(self) == 0) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

PyTypeObject ReplayType = {
    HOLDER_TYPE("Replay", sizeof(Replay), 0),
    .tp_new = replay_new,
    .tp_dealloc = holder_dealloc,
};
