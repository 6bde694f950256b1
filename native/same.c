/* Whether a batch is the last one again: what graphrt/core/runner/steps/again.py does in Python where
   this is not built. */
#include "native.h"

enum { FIELDS = 7, QUERY_LEN = 2, BOUNDS = 3, VARIANT = 5, EXCLUDE = 6 };

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *type, *bounds, *exclude;
} Same;

int is_same(PyObject *same, PyObject *batch, PyObject *last) {
    const Same *self = (const Same *)same;
    /* Its class first: a class of the host's own may call everything equal. */
    if ((PyObject *)Py_TYPE(batch) != self->type) return 0;
    if (batch == last) return 1;
    if ((PyObject *)Py_TYPE(last) != self->type) return 0;
    if (PyTuple_GET_SIZE(batch) != FIELDS || PyTuple_GET_SIZE(last) != FIELDS) return 0;
    for (Py_ssize_t each = 0; each < FIELDS; each++) {
        PyObject *ours = PyTuple_GET_ITEM(batch, each), *theirs = PyTuple_GET_ITEM(last, each);
        if (each == BOUNDS || each == EXCLUDE) {
            if (ours != (each == BOUNDS ? self->bounds : self->exclude)) return 0;
        } else if (each == VARIANT) {
            if (ours != Py_None) return 0;
        } else if (!PyLong_CheckExact(ours) || !PyLong_CheckExact(theirs)) {
            if (each != QUERY_LEN || ours != Py_None || theirs != Py_None) return 0;
        } else {
            int equal = PyObject_RichCompareBool(ours, theirs, Py_EQ);
            if (equal <= 0) return equal;
        }
    }
    return 1;
}

/* same(batch, last) */
static PyObject *same_call(PyObject *callable, PyObject *const *args, size_t flags,
                           PyObject *names) {
    if (PyVectorcall_NARGS(flags) != 2 || names != NULL) {
        PyErr_SetString(PyExc_TypeError, "same(batch, last)");
        return NULL;
    }
    int same = is_same(callable, args[0], args[1]);
    return same < 0 ? NULL : PyBool_FromLong(same);
}

static PyObject *same_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"type", "bounds", "exclude", NULL};
    PyObject *batch, *bounds, *exclude;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OO", keywords, &PyType_Type, &batch, &bounds,
                                     &exclude))
        return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)batch, &PyTuple_Type)) {
        PyErr_SetString(PyExc_TypeError, "batches are tuples");
        return NULL;
    }
    Same *self = (Same *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->call = same_call;
    self->type = Py_NewRef(batch);
    self->bounds = Py_NewRef(bounds);
    self->exclude = Py_NewRef(exclude);
    return (PyObject *)self;
}

static int same_traverse(Same *self, visitproc visit, void *arg) {
    Py_VISIT(self->type);
    Py_VISIT(self->bounds);
    Py_VISIT(self->exclude);
    return 0;
}

static int same_clear(Same *self) {
    Py_CLEAR(self->type);
    Py_CLEAR(self->bounds);
    Py_CLEAR(self->exclude);
    return 0;
}

static void same_dealloc(Same *self) {
    PyObject_GC_UnTrack(self);
    same_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

PyTypeObject SameType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "graphrt.core.base._native.Same",
    .tp_basicsize = sizeof(Same),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = same_new,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Same, call),
    .tp_traverse = (traverseproc)same_traverse,
    .tp_clear = (inquiry)same_clear,
    .tp_dealloc = (destructor)same_dealloc,
};
