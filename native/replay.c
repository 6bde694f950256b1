/* What runs a step that is one graph, whose inputs are like those before and whose output is one
   tensor: what StepExecutor.run of graphrt/core/runner/executor.py does in Python. Every other step it
   leaves to Python before it has done anything. */
#include "native.h"

/* The storages of outputs: see graphrt/core/replay/handout.py. */
typedef struct {
    PyObject *type, *use_count, *weakrefs, *is_inference, *all;
    long own;
    Py_ssize_t storage, cdata, alone, references, left, address, bases;
} Shells;

typedef struct {
    PyObject_HEAD
    PyObject *entry, *pool, *inputs, *ring, *fetch, *graph, *stream, *moves, *known, *shapes, *shell;
    Shells shells;
    Py_ssize_t count;
    Py_ssize_t entry_graph, unchecked, closed, step, stream_id, generation, turn, alike;
    Py_ssize_t pending, ring_count, unsure;
} Replay;

static PyObject *name_replay, *name_give_up, *name_anew, *name_data, *name_data_ptr, *name_dict;

static int is_equal(PyObject *one, PyObject *other) {
    return one == NULL || other == NULL ? 0 : PyObject_RichCompareBool(one, other, Py_EQ);
}

/* As Shell.is_held: 1, 0, or -1 with an error set. */
static int is_held(const Shells *at, PyObject *shell) {
    PyObject *storage = in_slot(shell, at->storage);
    if (storage == NULL || storage == Py_None) return 0;
    if (add_to_slot(shell, at->left, -1) < 0) return -1;
    long references = PyLong_AsLong(in_slot(shell, at->references));
    long left = PyLong_AsLong(in_slot(shell, at->left));
    if (PyErr_Occurred()) return -1;
    /* What Python counts there are two more, or as many as it holds while it asks. */
    if (left < 0 || (long)Py_REFCNT(storage) != references - at->own) return 1;
    Py_INCREF(storage);
    int held = -1;
    PyObject *uses = PyObject_CallOneArg(at->use_count, in_slot(shell, at->cdata));
    PyObject *address = uses ? PyObject_CallMethodNoArgs(storage, name_data_ptr) : NULL;
    PyObject *given = address ? PyObject_GetAttr(storage, name_dict) : NULL;
    PyObject *watched = given ? PyObject_CallOneArg(at->weakrefs, storage) : NULL;
    if (watched != NULL) {
        int same = is_equal(uses, in_slot(shell, at->alone));
        int there = same <= 0 ? same : is_equal(address, in_slot(shell, at->address));
        int bare = there <= 0 ? there : !PyObject_IsTrue(given) && !PyObject_IsTrue(watched);
        held = bare < 0 ? -1 : !bare;
    }
    Py_XDECREF(uses);
    Py_XDECREF(address);
    Py_XDECREF(given);
    Py_XDECREF(watched);
    Py_DECREF(storage);
    return held;
}

/* As expire. */
static int expire(const Shells *at) {
    for (Py_ssize_t each = 0; each < PyList_GET_SIZE(at->all); each++) {
        PyObject *shell = Py_NewRef(PyList_GET_ITEM(at->all, each));
        int held = -1;
        if (PyObject_TypeCheck(shell, (PyTypeObject *)at->type))
            held = is_held(at, shell);
        else
            PyErr_SetString(PyExc_TypeError, "outputs are handed out by shells");
        PyObject *gone = held > 0 ? PyObject_CallMethodNoArgs(shell, name_give_up) : NULL;
        Py_DECREF(shell);
        if (held < 0 || (held > 0 && gone == NULL)) return -1;
        Py_XDECREF(gone);
    }
    return PyList_SetSlice(at->all, 0, PyList_GET_SIZE(at->all), NULL);
}

/* As Shell.hand_out. */
static PyObject *hand_out(const Shells *at, PyObject *shell, PyObject *shape) {
    if (PyList_Append(at->all, shell) < 0) return NULL;
    PyObject *inference = PyObject_CallNoArgs(at->is_inference);
    if (inference == NULL) return NULL;
    PyObject *bases = in_slot(shell, at->bases), *base = NULL;
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

/* What is known of the batch's rows, owned: 1, or 0 where nothing is, or -1 with an error. */
static int look_up(const Replay *self, PyObject *batch, PyObject **moves, PyObject **shape) {
    PyObject *key = PyTuple_GetSlice(batch, 0, 2), *shapes = NULL;
    if (key == NULL) return -1;
    *moves = known_in(self->known, key);
    if (*moves != NULL) shapes = known_in(self->shapes, key);
    Py_DECREF(key);
    if (shapes != NULL && PyList_CheckExact(shapes) && PyList_GET_SIZE(shapes) == 1 &&
        PyTuple_CheckExact(PyList_GET_ITEM(shapes, 0)) &&
        (PyObject *)Py_TYPE(*moves) == self->moves)
        *shape = Py_NewRef(PyList_GET_ITEM(shapes, 0));
    Py_XDECREF(shapes);
    if (*shape != NULL) return 1;
    Py_CLEAR(*moves);
    return PyErr_Occurred() ? -1 : 0;
}

/* Whether the entry is still to be replayed. Whose turn it is in the pool the caller knows. */
static int is_usable(const Replay *self) {
    PyObject *pool = self->pool;
    return in_slot(self->entry, self->entry_graph) == self->graph &&
           in_slot(self->entry, self->unchecked) == Py_False &&
           in_slot(pool, self->closed) == Py_False && in_slot(pool, self->step) == Py_None;
}

/* Whether the stream is the one that the pool's last step ran on, or there are none: 1, 0 or -1. */
static int is_same_stream(const Replay *self) {
    if (self->stream == Py_None) return 1;
    PyObject *stream = PyObject_CallNoArgs(self->stream);
    if (stream == NULL) return -1;
    int same = is_equal(stream, in_slot(self->pool, self->stream_id));
    Py_DECREF(stream);
    return same;
}

/* The outputs; NULL with an error set, or without one where Python has to do the step. */
static PyObject *run(Replay *self, PyObject *moves, PyObject *shape, PyObject *values) {
    PyObject *pool = self->pool, *ring = self->ring;
    if (is_same_stream(self) <= 0) return NULL;
    PyObject *alike = in_slot(moves, self->alike);
    if (alike == NULL || alike == Py_None) return NULL;
    /* First: slots that were handed out are given up, whatever comes of the step. */
    if (add_to_slot(self->inputs, self->turn, 1) < 0) return NULL;
    PyObject *given[] = {values, self->fetch, Py_True};
    Py_INCREF(alike);
    PyObject *written = PyObject_Vectorcall(alike, given, 3, NULL);
    Py_DECREF(alike);
    Py_XDECREF(written);
    if (written != Py_True) return NULL;
    /* Not before: they may have been among the inputs. */
    if (PyList_GET_SIZE(self->shells.all) && expire(&self->shells) < 0) return NULL;
    if (add_to_slot(pool, self->generation, 1) < 0) return NULL;
    PyObject *launched = PyObject_CallMethodNoArgs(self->graph, name_replay);
    if (launched == NULL) return NULL;
    Py_DECREF(launched);
    set_slot(ring, self->pending, Py_None);
    if (add_to_slot(ring, self->ring_count, 1) < 0) return NULL;
    set_slot(ring, self->unsure, Py_False);
    return hand_out(&self->shells, self->shell, shape);
}

PyObject *replay_step(PyObject *replay, PyObject *batch, PyObject *values) {
    Replay *self = (Replay *)replay;
    PyObject *moves = NULL, *shape = NULL, *found = NULL;
    if (!PyDict_CheckExact(values) || PyDict_GET_SIZE(values) != self->count) return NULL;
    if (look_up(self, batch, &moves, &shape) <= 0) return NULL;
    if (is_usable(self)) found = run(self, moves, shape, values);
    Py_DECREF(moves);
    Py_DECREF(shape);
    return found;
}

int prepare_replay(void) {
    struct {
        PyObject **into;
        const char *text;
    } names[] = {{&name_replay, "replay"}, {&name_give_up, "give_up"},
                 {&name_anew, "_anew"},    {&name_data, "data"},
                 {&name_data_ptr, "data_ptr"}, {&name_dict, "__dict__"}};
    for (size_t each = 0; each < sizeof(names) / sizeof(*names); each++) {
        *names[each].into = PyUnicode_InternFromString(names[each].text);
        if (*names[each].into == NULL) return -1;
    }
    return 0;
}

static int find_all(Replay *self) {
    struct {
        PyTypeObject *type;
        const char *name;
        Py_ssize_t *into;
    } slots[] = {
        {Py_TYPE(self->entry), "graph", &self->entry_graph},
        {Py_TYPE(self->entry), "unchecked", &self->unchecked},
        {Py_TYPE(self->pool), "closed", &self->closed},
        {Py_TYPE(self->pool), "step", &self->step},
        {Py_TYPE(self->pool), "stream_id", &self->stream_id},
        {Py_TYPE(self->pool), "generation", &self->generation},
        {Py_TYPE(self->inputs), "turn", &self->turn},
        {(PyTypeObject *)self->moves, "alike", &self->alike},
        {Py_TYPE(self->ring), "pending", &self->pending},
        {Py_TYPE(self->ring), "count", &self->ring_count},
        {Py_TYPE(self->ring), "unsure", &self->unsure},
        {(PyTypeObject *)self->shells.type, "_storage", &self->shells.storage},
        {(PyTypeObject *)self->shells.type, "_cdata", &self->shells.cdata},
        {(PyTypeObject *)self->shells.type, "_alone", &self->shells.alone},
        {(PyTypeObject *)self->shells.type, "_references", &self->shells.references},
        {(PyTypeObject *)self->shells.type, "_left", &self->shells.left},
        {(PyTypeObject *)self->shells.type, "_address", &self->shells.address},
        {(PyTypeObject *)self->shells.type, "_bases", &self->shells.bases},
    };
    for (size_t each = 0; each < sizeof(slots) / sizeof(*slots); each++) {
        *slots[each].into = offset_of(slots[each].type, slots[each].name);
        if (*slots[each].into < 0) return -1;
    }
    return 0;
}

static PyObject *replay_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"entry",  "pool",  "inputs", "ring",  "fetch",  "graph",  "stream",
                               "count",  "moves", "known",  "shapes", "outputs", NULL};
    PyObject *entry, *pool, *inputs, *ring, *fetch, *graph, *stream, *moves, *known, *shapes;
    PyObject *shell, *of_shells, *all, *use_count, *weakrefs, *is_inference;
    Py_ssize_t count;
    long own;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OOOOOOOnO!O!O!(OO!O!OOOl)", keywords, &entry, &pool, &inputs, &ring,
            &fetch, &graph, &stream, &count, &PyType_Type, &moves, &PyDict_Type, &known,
            &PyDict_Type, &shapes, &shell, &PyType_Type, &of_shells, &PyList_Type, &all, &use_count,
            &weakrefs, &is_inference, &own))
        return NULL;
    if (!PyObject_TypeCheck(shell, (PyTypeObject *)of_shells)) {
        PyErr_SetString(PyExc_ValueError, "outputs are handed out by a shell");
        return NULL;
    }
    Replay *self = (Replay *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->entry = Py_NewRef(entry);
    self->pool = Py_NewRef(pool);
    self->inputs = Py_NewRef(inputs);
    self->ring = Py_NewRef(ring);
    self->fetch = Py_NewRef(fetch);
    self->graph = Py_NewRef(graph);
    self->stream = Py_NewRef(stream);
    self->moves = Py_NewRef(moves);
    self->known = Py_NewRef(known);
    self->shapes = Py_NewRef(shapes);
    self->shell = Py_NewRef(shell);
    self->shells.type = Py_NewRef(of_shells);
    self->shells.all = Py_NewRef(all);
    self->shells.use_count = Py_NewRef(use_count);
    self->shells.weakrefs = Py_NewRef(weakrefs);
    self->shells.is_inference = Py_NewRef(is_inference);
    self->shells.own = own;
    self->count = count;
    if (find_all(self) == 0) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

/* What it owns, for the three that have to know. */
#define OWNED(self)                                                                               \
    {&(self)->entry,        &(self)->pool,             &(self)->inputs,                           \
     &(self)->ring,         &(self)->fetch,            &(self)->graph,                            \
     &(self)->stream,       &(self)->moves,            &(self)->known,                            \
     &(self)->shapes,       &(self)->shell,            &(self)->shells.type,                      \
     &(self)->shells.all,   &(self)->shells.use_count, &(self)->shells.weakrefs,                  \
     &(self)->shells.is_inference}

static int replay_traverse(Replay *self, visitproc visit, void *arg) {
    PyObject **owned[] = OWNED(self);
    for (size_t each = 0; each < sizeof(owned) / sizeof(*owned); each++) Py_VISIT(*owned[each]);
    return 0;
}

static int replay_clear(Replay *self) {
    PyObject **owned[] = OWNED(self);
    for (size_t each = 0; each < sizeof(owned) / sizeof(*owned); each++) Py_CLEAR(*owned[each]);
    return 0;
}

static void replay_dealloc(Replay *self) {
    PyObject_GC_UnTrack(self);
    replay_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

PyTypeObject ReplayType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "graphrt.core.base._native.Replay",
    .tp_basicsize = sizeof(Replay),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = replay_new,
    .tp_traverse = (traverseproc)replay_traverse,
    .tp_clear = (inquiry)replay_clear,
    .tp_dealloc = (destructor)replay_dealloc,
};
