/* A runner's step from its call to its graph, for a batch that was dispatched to a graph before: what
   StepEngine.step of graphrt/core/runner/engine.py does in Python. For every other step it calls
   Python: `step` if it has done nothing yet, `check` or `serve` if it has counted the step. */
#include "native.h"

/* Its parts, from StepEngine.entrance. `failed` counts a step that raised; `owner` has the turn of
   `pool` in a step; `steps` are prepared ones, by the dispatcher's slot. */
enum {
    STEP, CHECK, SERVE, FAILED, POOL, OWNER, ENGINE, DISPATCHER, SEALING, CHECKS, GLANCES, STEPS,
    ELSEWHERE, UNDER_WAY, BATCHES, VERSION, COUNTS, PREPARED, PARTS
};

typedef struct {
    HOLDER_HEAD
    Py_ssize_t pool_owner, last_dispatch, live_tokens, may_capture, answers, batches, native,
        on, pending, looks;
} Path;

_Static_assert((int)PARTS <= (int)MOST_PARTS, "a path has more parts than a holder");

static PyObject *name_version;

/* batch, values, updates, metadata, agreed */
enum { BATCH, VALUES, UPDATES, METADATA, AGREED, ARGUMENTS };
/* The dispatcher's answer for a batch: where it is counted, and its dispatch. */
enum { COUNT, DISPATCH, ANSWER };

/* Whether this device is the current one; -1 with an error set. */
static int is_here(const Path *self) {
    if (self->of[ELSEWHERE] == Py_None) return 1;
    PyObject *elsewhere = PyObject_CallNoArgs(self->of[ELSEWHERE]);
    if (elsewhere == NULL) return -1;
    Py_DECREF(elsewhere);
    return elsewhere == Py_False;
}

/* The dispatcher's remembered answer, owned, where a graph serves the batch: 1; 0 where Python has to
   look, or -1 with an error set. It changes nothing. */
static int look_up(const Path *self, PyObject *batch, PyObject **answer) {
    if ((PyObject *)Py_TYPE(batch) != self->of[BATCHES]) return 0;
    if (in_slot(self->of[SEALING], self->may_capture) != Py_False) return 0;
    PyObject *version = PyObject_GetAttr(self->of[DISPATCHER], name_version);
    if (version == NULL) return -1;
    PyObject *answers = NULL, *known = NULL;
    if ((PyObject *)Py_TYPE(version) == self->of[VERSION])
        answers = Py_XNewRef(in_slot(version, self->answers));
    Py_DECREF(version);
    /* The lookup may run a host's __hash__ or __eq__, of a variant: `answers` is owned meanwhile. */
    if (answers != NULL && PyDict_CheckExact(answers))
        known = Py_XNewRef(PyDict_GetItemWithError(answers, batch));
    Py_XDECREF(answers);
    if (known == NULL) {
        if (!PyErr_Occurred()) return 0;
        if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
        /* Python looks the batch up again, and names the wrong field. */
        PyErr_Clear();
        return 0;
    }
    if (PyTuple_CheckExact(known) && PyTuple_GET_SIZE(known) == ANSWER &&
        (PyObject *)Py_TYPE(PyTuple_GET_ITEM(known, COUNT)) == self->of[COUNTS]) {
        PyObject *slot = PyTuple_GetItem(PyTuple_GET_ITEM(known, DISPATCH), 3);
        /* Of a batch without a graph it is -1. */
        if (slot != NULL && PyLong_AsSsize_t(slot) >= 0) {
            *answer = known;
            return 1;
        }
    }
    Py_DECREF(known);
    return PyErr_Occurred() ? -1 : 0;
}

/* As StepEngine.is_clear: whether the step is simply replayed; -1 with an error set. */
static int is_clear(const Path *self, PyObject *slot, PyObject *batch) {
    PyObject *checks = self->of[CHECKS];
    if (in_slot(checks, self->on) == Py_False) return 1;
    PyObject *pending = in_slot(checks, self->pending);
    PyObject *looks = in_slot(self->of[GLANCES], self->looks);
    if (pending == NULL || !PyDict_CheckExact(pending) || looks == NULL || !PyIter_Check(looks)) {
        PyErr_SetString(PyExc_TypeError, "the checks have no state yet");
        return -1;
    }
    PyObject *wanted = PyDict_GetItemWithError(pending, slot);
    if (wanted != NULL) {
        /* Tokens, or tokens and requests. */
        Py_INCREF(wanted);
        PyObject *rows = PyTuple_CheckExact(wanted) ? PyTuple_GetSlice(batch, 0, 2)
                                                    : Py_XNewRef(PyTuple_GetItem(batch, 0));
        int clear = rows == NULL ? -1 : PyObject_RichCompareBool(wanted, rows, Py_EQ);
        Py_XDECREF(rows);
        Py_DECREF(wanted);
        if (clear <= 0) return clear;
    } else if (PyErr_Occurred()) {
        return -1;
    }
    Py_INCREF(looks);
    PyObject *looked = Py_TYPE(looks)->tp_iternext(looks);
    Py_DECREF(looks);
    if (looked == NULL) {
        if (!PyErr_Occurred()) PyErr_SetNone(PyExc_StopIteration);
        return -1;
    }
    int clear = PyObject_IsTrue(looked);
    Py_DECREF(looked);
    return clear;
}

/* The outputs of the step in replay.c; NULL without an error where Python has to run the step. */
static PyObject *replayed(const Path *self, Py_ssize_t slot, PyObject *batch, PyObject *values) {
    PyObject *step = PyList_GetItem(self->of[STEPS], slot), *native = NULL;
    if (step == NULL) return NULL;
    if ((PyObject *)Py_TYPE(step) == self->of[PREPARED]) native = in_slot(step, self->native);
    if (native == NULL || !Py_IS_TYPE(native, &ReplayType)) return NULL;
    Py_INCREF(native);
    PyObject *outputs = replay_step(native, batch, values);
    Py_DECREF(native);
    return outputs;
}

/* As StepEngine.failed: the step is no HIT. Its error stays set. */
static void count_failed(const Path *self, PyObject *dispatch) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyObject *counted = PyObject_CallOneArg(self->of[FAILED], dispatch);
    if (counted == NULL) {
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(trace);
        return;
    }
    Py_DECREF(counted);
    PyErr_Restore(type, error, trace);
}

/* Run the step as it was dispatched; its outputs, or NULL with an error set. */
static PyObject *run_dispatched(Path *self, PyObject *const *args, PyObject *dispatch) {
    PyObject *batch = args[BATCH];
    PyObject *slot = PyTuple_GetItem(dispatch, 3), *tokens = PyTuple_GetItem(batch, 0);
    Py_ssize_t place = slot == NULL ? -1 : PyLong_AsSsize_t(slot);
    long long rows = tokens == NULL || PyErr_Occurred() ? -1 : PyLong_AsLongLong(tokens);
    if (PyErr_Occurred()) return NULL;
    PyObject *step[] = {batch,         dispatch,       args[VALUES],
                        args[UPDATES], args[METADATA], args[AGREED]};
    int clear = is_clear(self, slot, batch);
    if (clear < 0) return NULL;
    if (!clear) return PyObject_Vectorcall(self->of[CHECK], step, 6, NULL);
    set_slot(self->of[ENGINE], self->last_dispatch, dispatch);
    PyObject *outputs = replayed(self, place, batch, args[VALUES]);
    if (outputs != NULL && add_to_slot(self->of[ENGINE], self->live_tokens, rows) < 0)
        Py_CLEAR(outputs);
    if (outputs != NULL) return outputs;
    if (!PyErr_Occurred()) return PyObject_Vectorcall(self->of[SERVE], step, 6, NULL);
    count_failed(self, dispatch);
    return NULL;
}

/* The step in a turn of the pool: 1 with what it returned, 0 where Python has to do it, or -1. */
static int run_in_turn(Path *self, PyObject *const *args, PyObject **outputs) {
    PyObject *answer;
    int known = look_up(self, args[BATCH], &answer);
    if (known <= 0) return known;
    if (add_to_slot(PyTuple_GET_ITEM(answer, COUNT), self->batches, 1) == 0)
        *outputs = run_dispatched(self, args, PyTuple_GET_ITEM(answer, DISPATCH));
    Py_DECREF(answer);
    return *outputs == NULL ? -1 : 1;
}

/* run(batch, values, updates, metadata, agreed) */
static PyObject *path_call(PyObject *callable, PyObject *const *args, size_t flags,
                           PyObject *names) {
    Path *self = (Path *)callable;
    if (PyVectorcall_NARGS(flags) == ARGUMENTS && names == NULL &&
        args[AGREED] == Py_None && args[UPDATES] == Py_None &&
        PySet_GET_SIZE(self->of[UNDER_WAY]) == 0 &&
        /* A forked child must not ask the device of its parent, whose pools are taken in it. */
        in_slot(self->of[POOL], self->pool_owner) == Py_None) {
        int here = is_here(self);
        if (here < 0) return NULL;
        /* Before the lookup: without a turn another thread may destroy the graph (see in_turn).
           Nothing between this look and the store releases the GIL. */
        if (here && in_slot(self->of[POOL], self->pool_owner) == Py_None) {
            PyObject *outputs = NULL;
            set_slot(self->of[POOL], self->pool_owner, self->of[OWNER]);
            int done = run_in_turn(self, args, &outputs);
            set_slot(self->of[POOL], self->pool_owner, Py_None);
            if (done != 0) return outputs;
        }
    }
    return PyObject_Vectorcall(self->of[STEP], args, (size_t)PyVectorcall_NARGS(flags), names);
}

static int find_all(Path *self) {
    const Slot slots[] = {
        {Py_TYPE(self->of[POOL]), "owner", &self->pool_owner},
        {Py_TYPE(self->of[ENGINE]), "last_dispatch", &self->last_dispatch},
        {Py_TYPE(self->of[ENGINE]), "live_tokens", &self->live_tokens},
        {Py_TYPE(self->of[SEALING]), "may_capture", &self->may_capture},
        {Py_TYPE(self->of[CHECKS]), "on", &self->on},
        {Py_TYPE(self->of[CHECKS]), "pending", &self->pending},
        {Py_TYPE(self->of[GLANCES]), "looks", &self->looks},
        {self->of[VERSION], "answers", &self->answers},
        {self->of[COUNTS], "batches", &self->batches},
        {self->of[PREPARED], "native", &self->native},
    };
    return find_slots(slots, COUNT(slots));
}

static PyObject *path_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"step",      "check",     "serve",   "failed",  "pool",
                               "owner",     "engine",    "dispatcher", "sealing", "checks",
                               "glances",   "steps",     "elsewhere", "under_way", "batches",
                               "version",   "counts",    "prepared", NULL};
    PyObject *of[PARTS];
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OOOOOOOOOOOO!OO!O!O!O!O!", keywords, &of[STEP], &of[CHECK], &of[SERVE],
            &of[FAILED], &of[POOL], &of[OWNER], &of[ENGINE], &of[DISPATCHER], &of[SEALING],
            &of[CHECKS], &of[GLANCES], &PyList_Type, &of[STEPS], &of[ELSEWHERE], &PySet_Type,
            &of[UNDER_WAY], &PyType_Type, &of[BATCHES], &PyType_Type, &of[VERSION], &PyType_Type,
            &of[COUNTS], &PyType_Type, &of[PREPARED]))
        return NULL;
    Path *self = (Path *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->call = path_call;
    for (int each = 0; each < PARTS; each++) self->of[each] = Py_NewRef(of[each]);
    if (find_all(self) == 0) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

int prepare_path(void) {
    name_version = PyUnicode_InternFromString("version");
    return name_version == NULL ? -1 : 0;
}

PyTypeObject PathType = {
    HOLDER_TYPE("Path", sizeof(Path), Py_TPFLAGS_HAVE_VECTORCALL),
    .tp_new = path_new,
    .tp_dealloc = holder_dealloc,
};
