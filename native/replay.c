/* What runs a step that is one graph, whose inputs are like those before and whose output is one
   tensor: what graphrt/core/runner/steps/replayed.py does in Python where this is not built. Every
   other step it leaves to Python before it has done anything. */
#include "native.h"

/* The storages of outputs: see graphrt/core/replay/handout.py. */
typedef struct {
    PyObject *type, *use_count, *weakrefs, *is_inference, *all;
    long own;
    Py_ssize_t storage, cdata, alone, references, left, address, bases;
} Shells;

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *slow, *look, *hot, *entry, *pool, *inputs, *ring, *fetch, *graph, *shell, *stream;
    Shells shells;
    Py_ssize_t place, count;
    Py_ssize_t by_slot, unchecked, closed, step, stream_id, generation, turn, alike;
    Py_ssize_t pending, ring_count, unsure;
    /* The last batch, and what is known of it. */
    PyObject *batch, *moves, *shape;
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

/* What is known of the batch, owned: 1, or 0 where nothing is, or -1 with an error. */
static int look_up(Replay *self, PyObject *batch, PyObject **moves, PyObject **shape) {
    if (batch == self->batch) {
        *moves = Py_NewRef(self->moves);
        *shape = Py_NewRef(self->shape);
        return 1;
    }
    PyObject *found = PyObject_CallOneArg(self->look, batch);
    if (found == NULL) return -1;
    int known = found != Py_None;
    if (known && !PyArg_ParseTuple(found, "OO!", moves, &PyTuple_Type, shape)) known = -1;
    if (known > 0) {
        PyObject *before[] = {self->batch, self->moves, self->shape};
        /* Twice: what the end of a batch runs may be a step, which leaves its own here. */
        Py_INCREF(*moves);
        Py_INCREF(*shape);
        self->batch = Py_NewRef(batch);
        self->moves = Py_NewRef(*moves);
        self->shape = Py_NewRef(*shape);
        for (int each = 0; each < 3; each++) Py_XDECREF(before[each]);
    }
    Py_DECREF(found);
    return known;
}

/* Whether the entry is still the one to replay. Whose turn it is in the pool the caller knows. */
static int is_usable(const Replay *self) {
    PyObject *by_slot = in_slot(self->hot, self->by_slot), *pool = self->pool;
    return by_slot != NULL && PyList_CheckExact(by_slot) &&
           self->place < PyList_GET_SIZE(by_slot) &&
           PyList_GET_ITEM(by_slot, self->place) == self->entry &&
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

/* The same, where nothing but the common case is at hand. */
static PyObject *run_common(Replay *self, PyObject *batch, PyObject *values) {
    PyObject *moves, *shape, *found = NULL;
    if (!PyDict_CheckExact(values) || PyDict_GET_SIZE(values) != self->count) return NULL;
    if (look_up(self, batch, &moves, &shape) <= 0) return NULL;
    if (is_usable(self)) found = run(self, moves, shape, values);
    Py_DECREF(moves);
    Py_DECREF(shape);
    return found;
}

/* replay(live, batch, values) */
static PyObject *replay_step(PyObject *callable, PyObject *const *args, size_t flags,
                             PyObject *names) {
    Replay *self = (Replay *)callable;
    Py_ssize_t count = PyVectorcall_NARGS(flags);
    if (count == 3 && names == NULL) {
        PyObject *found = run_common(self, args[1], args[2]);
        if (found != NULL || PyErr_Occurred()) return found;
    }
    return PyObject_Vectorcall(self->slow, args, (size_t)count, names);
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

static int find_all(Replay *self, PyObject *moves_type) {
    struct {
        PyTypeObject *type;
        const char *name;
        Py_ssize_t *into;
    } slots[] = {
        {Py_TYPE(self->hot), "by_slot", &self->by_slot},
        {Py_TYPE(self->entry), "unchecked", &self->unchecked},
        {Py_TYPE(self->pool), "closed", &self->closed},
        {Py_TYPE(self->pool), "step", &self->step},
        {Py_TYPE(self->pool), "stream_id", &self->stream_id},
        {Py_TYPE(self->pool), "generation", &self->generation},
        {Py_TYPE(self->inputs), "turn", &self->turn},
        {(PyTypeObject *)moves_type, "alike", &self->alike},
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
    static char *keywords[] = {"slow", "look",  "hot",   "entry",  "place", "pool",  "inputs",
                               "ring", "fetch", "graph", "stream", "count", "moves", "outputs",
                               NULL};
    PyObject *slow, *look, *hot, *entry, *pool, *inputs, *ring, *fetch, *graph, *stream, *moves;
    PyObject *shell, *of_shells, *all, *use_count, *weakrefs, *is_inference;
    Py_ssize_t place, count;
    long own;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OOOOnOOOOOOnO!(OO!O!OOOl)", keywords, &slow, &look, &hot, &entry, &place,
            &pool, &inputs, &ring, &fetch, &graph, &stream, &count, &PyType_Type, &moves, &shell,
            &PyType_Type, &of_shells, &PyList_Type, &all, &use_count, &weakrefs, &is_inference,
            &own))
        return NULL;
    if (place < 0 || !PyObject_TypeCheck(shell, (PyTypeObject *)of_shells)) {
        PyErr_SetString(PyExc_ValueError, "a place in by_slot, and a shell");
        return NULL;
    }
    Replay *self = (Replay *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->call = replay_step;
    self->slow = Py_NewRef(slow);
    self->look = Py_NewRef(look);
    self->hot = Py_NewRef(hot);
    self->entry = Py_NewRef(entry);
    self->pool = Py_NewRef(pool);
    self->inputs = Py_NewRef(inputs);
    self->ring = Py_NewRef(ring);
    self->fetch = Py_NewRef(fetch);
    self->graph = Py_NewRef(graph);
    self->stream = Py_NewRef(stream);
    self->shell = Py_NewRef(shell);
    self->shells.type = Py_NewRef(of_shells);
    self->shells.all = Py_NewRef(all);
    self->shells.use_count = Py_NewRef(use_count);
    self->shells.weakrefs = Py_NewRef(weakrefs);
    self->shells.is_inference = Py_NewRef(is_inference);
    self->shells.own = own;
    self->place = place;
    self->count = count;
    if (find_all(self, moves) == 0) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

/* What it owns, for the three that have to know. */
#define OWNED(self)                                                                               \
    {&(self)->slow,         &(self)->look,           &(self)->hot,                                \
     &(self)->entry,        &(self)->pool,           &(self)->inputs,                             \
     &(self)->ring,         &(self)->fetch,          &(self)->graph,                              \
     &(self)->stream,       &(self)->shell,          &(self)->shells.type,                        \
     &(self)->shells.all,   &(self)->shells.use_count, &(self)->shells.weakrefs,                  \
     &(self)->shells.is_inference, &(self)->batch,   &(self)->moves,                              \
     &(self)->shape}

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
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = replay_new,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Replay, call),
    .tp_traverse = (traverseproc)replay_traverse,
    .tp_clear = (inquiry)replay_clear,
    .tp_dealloc = (destructor)replay_dealloc,
};
