/* What the C files share. Python's own headers and none of torch's: what is torch's is passed in, so
   one build serves every version of it. */
#ifndef GRAPHRT_NATIVE_H
#define GRAPHRT_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stdint.h>
#include <string.h>

enum { MOST_INPUTS = 64, MOST_PARTS = 18 };

/* The head of a C object that is made of Python objects, its parts `of`, and owns nothing else. */
#define HOLDER_HEAD                                                                                \
    PyObject_HEAD                                                                                  \
    vectorcallfunc call;                                                                           \
    PyObject *of[MOST_PARTS];

typedef struct {
    HOLDER_HEAD
} Holder;

int holder_traverse(PyObject *self, visitproc visit, void *arg);
int holder_clear(PyObject *self);
void holder_dealloc(PyObject *self);

/* The common fields of the types of such objects; `more` are the flags of one that can be called. */
#define HOLDER_TYPE(name, size, more)                                                              \
    PyVarObject_HEAD_INIT(NULL, 0)                                                                 \
    .tp_name = "graphrt.core.base._native." name, .tp_basicsize = (size),                          \
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | (more), .tp_traverse = holder_traverse,  \
    .tp_clear = holder_clear, .tp_vectorcall_offset = offsetof(Holder, call),                      \
    .tp_call = (more) ? PyVectorcall_Call : NULL

extern PyTypeObject WriterType, ReplayType, PathType, GlancesType;

/* The CPython versions whose watchers of dicts watch.c was tested with. */
#define HAS_WATCH (PY_VERSION_HEX >= 0x030C0000 && PY_VERSION_HEX < 0x030E0000)
#if HAS_WATCH
extern PyTypeObject WatchType;
#endif

/* Once, before objects of these types are made; -1 with an error set. */
int prepare_replay(void);
int prepare_path(void);

/* What a step by a `Replay` returns; NULL with an error set, or without one where Python has to run
   it. Its caller has the pool's turn. */
PyObject *replay_step(PyObject *replay, PyObject *batch, PyObject *values);

/* Slots of Python classes, read and written at their offset in an object. */

/* The offset of a slot in objects of a class; -1 with an error set where it has no such slot. */
static inline Py_ssize_t offset_of(PyTypeObject *type, const char *name) {
    PyObject *found = PyObject_GetAttrString((PyObject *)type, name);
    if (found == NULL) return -1;
    Py_ssize_t offset = -1;
    if (Py_IS_TYPE(found, &PyMemberDescr_Type) &&
        ((PyMemberDescrObject *)found)->d_member->type == T_OBJECT_EX)
        offset = ((PyMemberDescrObject *)found)->d_member->offset;
    else
        PyErr_Format(PyExc_TypeError, "%s is no slot of %s", name, type->tp_name);
    Py_DECREF(found);
    return offset;
}

/* A slot of a class, and where to store its offset. */
typedef struct {
    void *type;
    const char *name;
    Py_ssize_t *into;
} Slot;

/* Store the offsets of so many slots; -1 with an error set. */
int find_slots(const Slot *slots, size_t count);

#define COUNT(array) (sizeof(array) / sizeof(*(array)))

static inline PyObject **slot_of(PyObject *object, Py_ssize_t offset) {
    return (PyObject **)((char *)object + offset);
}

static inline PyObject *in_slot(PyObject *object, Py_ssize_t offset) {
    return *slot_of(object, offset);
}

static inline void set_slot(PyObject *object, Py_ssize_t offset, PyObject *value) {
    PyObject **slot = slot_of(object, offset), *before = *slot;
    *slot = Py_NewRef(value);
    Py_XDECREF(before);
}

/* Add `more` to the count in a slot; -1 with an error set. */
static inline int add_to_slot(PyObject *object, Py_ssize_t offset, long long more) {
    PyObject *was = in_slot(object, offset);
    long long count = was == NULL ? -1 : PyLong_AsLongLong(was);
    if (count == -1 && (was == NULL || PyErr_Occurred())) {
        if (was == NULL) PyErr_SetString(PyExc_AttributeError, "nothing is counted yet");
        return -1;
    }
    PyObject *now = PyLong_FromLongLong(count + more);
    if (now == NULL) return -1;
    set_slot(object, offset, now);
    Py_DECREF(now);
    return 0;
}

#endif
