/* Whether a batch is the last one again: what `same_in_python` of graphrt/core/batch/descriptor.py does
   where this is not built. */
#include "native.h"

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *type;
} Same;

int is_same(PyObject *same, PyObject *batch, PyObject *last) {
    const Same *self = (const Same *)same;
    /* Its class first: a class of the host's own may call everything equal. */
    if ((PyObject *)Py_TYPE(batch) != self->type) return 0;
    if (batch == last) return 1;
    if ((PyObject *)Py_TYPE(last) != self->type) return 0;
    if (PyTuple_GET_SIZE(batch) != PyTuple_GET_SIZE(last)) return 0;
    /* The last one is plain: what is no int in it is a constant, such as None or the empty bounds. */
    for (Py_ssize_t each = 0; each < PyTuple_GET_SIZE(last); each++) {
        PyObject *ours = PyTuple_GET_ITEM(batch, each), *theirs = PyTuple_GET_ITEM(last, each);
        if (ours == theirs) continue;
        if (!PyLong_CheckExact(ours) || !PyLong_CheckExact(theirs)) return 0;
        int equal = PyObject_RichCompareBool(ours, theirs, Py_EQ);
        if (equal <= 0) return equal;
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
    static char *keywords[] = {"type", NULL};
    PyObject *batch;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!", keywords, &PyType_Type, &batch))
        return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)batch, &PyTuple_Type)) {
        PyErr_SetString(PyExc_TypeError, "batches are tuples");
        return NULL;
    }
    Same *self = (Same *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->call = same_call;
    self->type = Py_NewRef(batch);
    return (PyObject *)self;
}

static int same_traverse(Same *self, visitproc visit, void *arg) {
    Py_VISIT(self->type);
    return 0;
}

static int same_clear(Same *self) {
    Py_CLEAR(self->type);
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
