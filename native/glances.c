/* An iterator with one answer for each step: whether the next few Python slots and the next tensor are
   as they were. Where this is not built graphrt/trust/glances.py makes it of iterators.

   SLOTS are triples (holder, key, value as it was). The value is an item of a dict or list, or what a
   cell holds; for an object with its class as the key its `__dict__`, as long as it is of that class;
   for a tuple of containers the tuple of their sizes; for any other holder what it returns when it is
   called. MISSING stands for no value. TENSORS are triples (tensor, a call that gives its address,
   shape, strides or dtype, that as it was). OVER is the iterator whose answer comes first. */
#include "native.h"

enum { SLOTS, TENSORS, MISSING, OVER, PARTS };
enum { KINDS = 2 };

typedef struct {
    HOLDER_HEAD
    Py_ssize_t next[KINDS], looks[KINDS];
} Glances;

/* What is there now, owned; NULL with an error set. */
static PyObject *value_of(PyObject *holder, PyObject *key, PyObject *missing) {
    PyObject *value = NULL;
    if ((PyObject *)Py_TYPE(holder) == key) {
        return PyObject_GenericGetDict(holder, NULL);
    } else if (PyDict_Check(holder)) {
        value = Py_XNewRef(PyDict_GetItemWithError(holder, key));
        if (value == NULL && PyErr_Occurred()) return NULL;
    } else if (PyList_CheckExact(holder)) {
        Py_ssize_t at = PyLong_AsSsize_t(key);
        if (at == -1 && PyErr_Occurred()) return NULL;
        if (at >= 0 && at < PyList_GET_SIZE(holder)) value = Py_NewRef(PyList_GET_ITEM(holder, at));
    } else if (PyCell_Check(holder)) {
        value = Py_XNewRef(PyCell_GET(holder));
    } else if (!PyType_Check(key)) {
        return PyObject_CallNoArgs(holder);
    }
    return value == NULL ? Py_NewRef(missing) : value;
}

static Py_ssize_t size_of(PyObject *container) {
    if (PyDict_Check(container)) return PyDict_GET_SIZE(container);
    if (PyList_Check(container)) return PyList_GET_SIZE(container);
    return PyAnySet_Check(container) ? PySet_GET_SIZE(container) : -1;
}

static int have_sizes(PyObject *containers, PyObject *sizes) {
    for (Py_ssize_t each = 0; each < PyTuple_GET_SIZE(containers); each++) {
        Py_ssize_t size = PyLong_AsSsize_t(PyTuple_GET_ITEM(sizes, each));
        if (size == -1 && PyErr_Occurred()) return -1;
        if (size != size_of(PyTuple_GET_ITEM(containers, each))) return 0;
    }
    return 1;
}

/* Whether a slot or tensor is as it was: 1, 0, or -1 with an error set. */
static int is_same(const Glances *self, PyObject *look, int kind) {
    PyObject *holder = PyTuple_GET_ITEM(look, 0), *key = PyTuple_GET_ITEM(look, 1), *now;
    PyObject *was = PyTuple_GET_ITEM(look, 2);
    if (kind != TENSORS && PyTuple_CheckExact(holder)) return have_sizes(holder, was);
    now = kind == TENSORS ? PyObject_CallOneArg(key, holder)
                          : value_of(holder, key, self->of[MISSING]);
    if (now == NULL) return -1;
    int same = now == was;
    /* Numbers, tuples of numbers, and dtypes. Values of slots are not compared: that may run anything. */
    if (!same && kind == TENSORS) same = PyObject_RichCompareBool(now, was, Py_EQ);
    Py_DECREF(now);
    return same;
}

static PyObject *glances_next(PyObject *object) {
    Glances *self = (Glances *)object;
    if (self->of[OVER] != NULL) {
        PyObject *answer = Py_TYPE(self->of[OVER])->tp_iternext(self->of[OVER]);
        if (answer != Py_True) return answer;
        Py_DECREF(answer);
    }
    for (int kind = 0; kind < KINDS; kind++) {
        PyObject *all = self->of[kind];
        Py_ssize_t count = all == NULL ? 0 : PyTuple_GET_SIZE(all);
        Py_ssize_t looks = self->looks[kind] < count ? self->looks[kind] : count;
        for (Py_ssize_t each = 0; each < looks; each++) {
            Py_ssize_t at = self->next[kind];
            self->next[kind] = at + 1 < count ? at + 1 : 0;
            int same = is_same(self, PyTuple_GET_ITEM(all, at), kind);
            if (same < 0) return NULL;
            if (!same) return Py_NewRef(Py_False);
        }
    }
    return Py_NewRef(Py_True);
}

static int are_looks(PyObject *looks) {
    for (Py_ssize_t each = 0; each < PyTuple_GET_SIZE(looks); each++) {
        PyObject *look = PyTuple_GET_ITEM(looks, each);
        if (!PyTuple_Check(look) || PyTuple_GET_SIZE(look) != 3) {
            PyErr_SetString(PyExc_TypeError, "a look is a holder, a key and a value");
            return 0;
        }
        PyObject *holder = PyTuple_GET_ITEM(look, 0), *was = PyTuple_GET_ITEM(look, 2);
        if (PyTuple_CheckExact(holder) &&
            !(PyTuple_CheckExact(was) && PyTuple_GET_SIZE(was) == PyTuple_GET_SIZE(holder))) {
            PyErr_SetString(PyExc_TypeError, "a size for each container");
            return 0;
        }
    }
    return 1;
}

static PyObject *glances_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"slots", "tensors", "looks", "missing", "over", NULL};
    PyObject *of[PARTS];
    Py_ssize_t looks[KINDS];
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O!O!(nn)OO", keywords, &PyTuple_Type, &of[SLOTS], &PyTuple_Type,
            &of[TENSORS], &looks[SLOTS], &looks[TENSORS], &of[MISSING], &of[OVER]))
        return NULL;
    if (!PyIter_Check(of[OVER])) {
        PyErr_SetString(PyExc_TypeError, "looks are over an iterator");
        return NULL;
    }
    for (int kind = 0; kind < KINDS; kind++) {
        if (!are_looks(of[kind])) return NULL;
    }
    Glances *self = (Glances *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    for (int each = 0; each < PARTS; each++) self->of[each] = Py_NewRef(of[each]);
    memcpy(self->looks, looks, sizeof(looks));
    return (PyObject *)self;
}

PyTypeObject GlancesType = {
    HOLDER_TYPE("Glances", sizeof(Glances), 0),
    .tp_new = glances_new,
    .tp_dealloc = holder_dealloc,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = glances_next,
};
