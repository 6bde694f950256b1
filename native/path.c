/* What a runner's step goes through before its graph, where its batch is the last one's again: what
   StepPath.run of graphrt/core/runner/_path.py does in Python where this is not built. Every other
   step it leaves to Python before it has done anything. */
#include "native.h"

/* What it is made of, by Python. `slow` does a whole step, `checked` one whose graph is not clear to
   be replayed, `by_context` one that is more than its graph; `failed` is told of one that raised.
   `owner` is who has the turn of `pool` in a step. */
enum {
    SLOW, CHECKED, BY_CONTEXT, FAILED, POOL, OWNER, PATH, DISPATCHER, SEALING, CHECKS, BY_SLOT,
    ELSEWHERE, UNDER_WAY, NOT_ALONE, SAME, GRAPHS, STEPS, PARTS
};

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *of[PARTS];
    Py_ssize_t pool_owner, last, last_dispatch, live_tokens, may_capture, batches, found, replay;
} Path;

static PyObject *name_version, *name_pending, *name_looks, *name_live;

/* batch, values, updates, metadata, agreed; `last` and `graph` are owned by who calls. */
enum { BATCH, VALUES, UPDATES, METADATA, AGREED, ARGUMENTS };
enum { LAST_BATCH, LAST_VERSION, LAST_GRAPH, LASTS };

/* Whether an attribute is this object; -1 with an error set. */
static int is_attribute(PyObject *of, PyObject *name, PyObject *what) {
    PyObject *found = PyObject_GetAttr(of, name);
    if (found == NULL) return -1;
    Py_DECREF(found);
    return found == what;
}

/* Whether this device is the current one; -1 with an error set. */
static int is_here(const Path *self) {
    if (self->of[ELSEWHERE] == Py_None) return 1;
    PyObject *elsewhere = PyObject_CallNoArgs(self->of[ELSEWHERE]);
    if (elsewhere == NULL) return -1;
    Py_DECREF(elsewhere);
    return elsewhere == Py_False;
}

/* Whether the step is the last one's batch again, and nothing asks for more than its graph; -1 with
   an error set. Nothing is done yet. */
static int is_again(const Path *self, PyObject *const *args, PyObject *last) {
    if (!PyTuple_CheckExact(last) || PyTuple_GET_SIZE(last) != LASTS) return 0;
    PyObject *graph = PyTuple_GET_ITEM(last, LAST_GRAPH);
    if ((PyObject *)Py_TYPE(graph) != self->of[GRAPHS]) return 0;
    if (in_slot(self->of[SEALING], self->may_capture) != Py_False) return 0;
    int same = is_attribute(self->of[DISPATCHER], name_version, PyTuple_GET_ITEM(last, LAST_VERSION));
    if (same > 0) same = is_same(self->of[SAME], args[BATCH], PyTuple_GET_ITEM(last, LAST_BATCH));
    return same;
}

/* As Checks.clear: whether the step is simply replayed; -1 with an error set. */
static int is_clear(const Path *self, PyObject *slot, PyObject *tokens) {
    PyObject *checks = self->of[CHECKS];
    if (checks == Py_None) return 1;
    PyObject *pending = PyObject_GetAttr(checks, name_pending);
    if (pending == NULL) return -1;
    int clear = PyDict_CheckExact(pending);
    PyObject *wanted = clear ? PyDict_GetItemWithError(pending, slot) : NULL;
    if (wanted != NULL) clear = PyObject_RichCompareBool(wanted, tokens, Py_EQ);
    else if (PyErr_Occurred()) clear = -1;
    Py_DECREF(pending);
    if (clear <= 0) return clear;
    PyObject *looks = PyObject_GetAttr(checks, name_looks);
    if (looks == NULL) return -1;
    PyObject *looked = PyIter_Check(looks) ? Py_TYPE(looks)->tp_iternext(looks) : NULL;
    Py_DECREF(looks);
    if (looked == NULL) {
        if (!PyErr_Occurred()) PyErr_SetNone(PyExc_StopIteration);
        return -1;
    }
    clear = PyObject_IsTrue(looked);
    Py_DECREF(looked);
    return clear;
}

/* What the graph's own step returns: NOT_ALONE where it is more than its graph. */
static PyObject *replayed(const Path *self, Py_ssize_t slot, PyObject *batch, PyObject *values) {
    PyObject *step = PyList_GetItem(self->of[BY_SLOT], slot);
    if (step == NULL) return NULL;
    PyObject *replay = NULL, *outputs = NULL;
    if ((PyObject *)Py_TYPE(step) == self->of[STEPS]) replay = in_slot(step, self->replay);
    if (replay == NULL || replay == Py_None) return Py_NewRef(self->of[NOT_ALONE]);
    Py_INCREF(replay);
    PyObject *live = PyObject_GetAttr(step, name_live);
    PyObject *given[] = {live, batch, values};
    if (live != NULL) outputs = PyObject_Vectorcall(replay, given, 3, NULL);
    Py_XDECREF(live);
    Py_DECREF(replay);
    return outputs;
}

/* As StepPath.failed: the step is no HIT. Its error stays set. */
static void tell_failed(const Path *self, PyObject *found) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyObject *told = PyObject_CallOneArg(self->of[FAILED], found);
    if (told == NULL) {
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(trace);
        return;
    }
    Py_DECREF(told);
    PyErr_Restore(type, error, trace);
}

/* The step, of which `found` is told. */
static PyObject *run_found(Path *self, PyObject *const *args, PyObject *batch, PyObject *found) {
    PyObject *slot = PyTuple_GetItem(found, 3), *tokens = PyTuple_GetItem(batch, 0);
    Py_ssize_t place = slot == NULL ? -1 : PyLong_AsSsize_t(slot);
    long long rows = tokens == NULL || PyErr_Occurred() ? -1 : PyLong_AsLongLong(tokens);
    if (PyErr_Occurred()) return NULL;
    PyObject *given[] = {batch, found, args[VALUES], args[UPDATES], args[METADATA], args[AGREED]};
    int clear = is_clear(self, slot, tokens);
    if (clear < 0) return NULL;
    if (!clear) return PyObject_Vectorcall(self->of[CHECKED], given, 6, NULL);
    set_slot(self->of[PATH], self->last_dispatch, found);
    PyObject *outputs = replayed(self, place, batch, args[VALUES]);
    if (outputs == NULL) tell_failed(self, found);
    if (outputs == self->of[NOT_ALONE]) {
        Py_DECREF(outputs);
        return PyObject_Vectorcall(self->of[BY_CONTEXT], given, 5, NULL);
    }
    if (outputs != NULL && add_to_slot(self->of[PATH], self->live_tokens, rows) < 0)
        Py_CLEAR(outputs);
    return outputs;
}

static PyObject *run_again(Path *self, PyObject *const *args, PyObject *last) {
    PyObject *graph = PyTuple_GET_ITEM(last, LAST_GRAPH);
    if (add_to_slot(graph, self->batches, 1) < 0) return NULL;
    PyObject *found = Py_NewRef(in_slot(graph, self->found));
    PyObject *outputs = run_found(self, args, PyTuple_GET_ITEM(last, LAST_BATCH), found);
    Py_DECREF(found);
    return outputs;
}

/* The step in a turn of the pool: 1 with what it returned, 0 where Python has to do it, or -1. */
static int run_in_turn(Path *self, PyObject *const *args, PyObject **outputs) {
    PyObject *last = Py_XNewRef(in_slot(self->of[PATH], self->last));
    if (last == NULL) return 0;
    int again = is_again(self, args, last);
    if (again > 0) {
        *outputs = run_again(self, args, last);
        if (*outputs == NULL) again = -1;
    }
    Py_DECREF(last);
    return again;
}

/* run(batch, values, updates, metadata, agreed) */
static PyObject *path_call(PyObject *callable, PyObject *const *args, size_t flags,
                           PyObject *names) {
    Path *self = (Path *)callable;
    if (PyVectorcall_NARGS(flags) == ARGUMENTS && names == NULL &&
        args[AGREED] == Py_None && args[UPDATES] == Py_None &&
        PySet_GET_SIZE(self->of[UNDER_WAY]) == 0) {
        int here = is_here(self);
        if (here < 0) return NULL;
        /* First, so that nothing is looked up that may go: see Turn. From the look to the store
           nothing gives the interpreter away. */
        if (here && in_slot(self->of[POOL], self->pool_owner) == Py_None) {
            PyObject *outputs = NULL;
            set_slot(self->of[POOL], self->pool_owner, self->of[OWNER]);
            int done = run_in_turn(self, args, &outputs);
            set_slot(self->of[POOL], self->pool_owner, Py_None);
            if (done != 0) return outputs;
        }
    }
    return PyObject_Vectorcall(self->of[SLOW], args, (size_t)PyVectorcall_NARGS(flags), names);
}

static int find_all(Path *self) {
    struct {
        PyObject *type;
        const char *name;
        Py_ssize_t *into;
    } slots[] = {
        {(PyObject *)Py_TYPE(self->of[POOL]), "owner", &self->pool_owner},
        {(PyObject *)Py_TYPE(self->of[PATH]), "_last", &self->last},
        {(PyObject *)Py_TYPE(self->of[PATH]), "last_dispatch", &self->last_dispatch},
        {(PyObject *)Py_TYPE(self->of[PATH]), "live_tokens", &self->live_tokens},
        {(PyObject *)Py_TYPE(self->of[SEALING]), "may_capture", &self->may_capture},
        {self->of[GRAPHS], "batches", &self->batches},
        {self->of[GRAPHS], "found", &self->found},
        {self->of[STEPS], "replay", &self->replay},
    };
    for (size_t each = 0; each < sizeof(slots) / sizeof(*slots); each++) {
        *slots[each].into = offset_of((PyTypeObject *)slots[each].type, slots[each].name);
        if (*slots[each].into < 0) return -1;
    }
    return 0;
}

static PyObject *path_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"slow",       "checked", "by_context", "failed",    "pool",
                               "owner",      "path",    "dispatcher", "sealing",   "checks",
                               "by_slot",    "elsewhere", "under_way", "not_alone", "same",
                               "graphs",     "steps",   NULL};
    PyObject *of[PARTS];
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OOOOOOOOOOO!OO!OO!O!O!", keywords, &of[SLOW], &of[CHECKED],
            &of[BY_CONTEXT], &of[FAILED], &of[POOL], &of[OWNER], &of[PATH], &of[DISPATCHER],
            &of[SEALING], &of[CHECKS], &PyList_Type, &of[BY_SLOT], &of[ELSEWHERE], &PySet_Type,
            &of[UNDER_WAY], &of[NOT_ALONE], &SameType, &of[SAME], &PyType_Type, &of[GRAPHS],
            &PyType_Type, &of[STEPS]))
        return NULL;
    Path *self = (Path *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->call = path_call;
    for (int each = 0; each < PARTS; each++) self->of[each] = Py_NewRef(of[each]);
    if (find_all(self) == 0) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static int path_traverse(Path *self, visitproc visit, void *arg) {
    for (int each = 0; each < PARTS; each++) Py_VISIT(self->of[each]);
    return 0;
}

static int path_clear(Path *self) {
    for (int each = 0; each < PARTS; each++) Py_CLEAR(self->of[each]);
    return 0;
}

static void path_dealloc(Path *self) {
    PyObject_GC_UnTrack(self);
    path_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

int prepare_path(void) {
    name_version = PyUnicode_InternFromString("version");
    name_pending = PyUnicode_InternFromString("pending");
    name_looks = PyUnicode_InternFromString("looks");
    name_live = PyUnicode_InternFromString("live");
    return name_version && name_pending && name_looks && name_live ? 0 : -1;
}

PyTypeObject PathType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "graphrt.core.base._native.Path",
    .tp_basicsize = sizeof(Path),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = path_new,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Path, call),
    .tp_traverse = (traverseproc)path_traverse,
    .tp_clear = (inquiry)path_clear,
    .tp_dealloc = (destructor)path_dealloc,
};
