/* Copying a step's inputs into the slot of a ring, in one call; see graphrt/core/inputs/transfer/alike.py, which does the same
   without it. Built only with GRAPHRT_NATIVE=1: see setup.py.

   Plain Python API and no header of torch: addresses come from Tensor.data_ptr, which is passed in,
   so one build serves every version of torch. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

enum { MOST_INPUTS = 256 };

typedef struct {
    int64_t offset, nbytes;
} Part;

/* gather(check, address_of, tensors, parts, base): False, with nothing copied, where check(*tensors)
   is false or a tensor has no memory. `parts` are the Part of each tensor. */
static PyObject *gather(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    uint64_t starts[MOST_INPUTS];
    if (count != 5 || !PyTuple_Check(args[2]) || !PyBytes_Check(args[3])) {
        PyErr_SetString(PyExc_TypeError, "gather(check, address_of, tuple, bytes, int)");
        return NULL;
    }
    PyObject *const *tensors = &PyTuple_GET_ITEM(args[2], 0);
    Py_ssize_t inputs = PyTuple_GET_SIZE(args[2]);
    if (inputs > MOST_INPUTS || PyBytes_GET_SIZE(args[3]) != inputs * (Py_ssize_t)sizeof(Part)) {
        PyErr_SetString(PyExc_ValueError, "gather: one part for each of at most 256 tensors");
        return NULL;
    }
    uint64_t base = PyLong_AsUnsignedLongLong(args[4]);
    if (base == (uint64_t)-1 && PyErr_Occurred()) return NULL;

    PyObject *right = PyObject_Vectorcall(args[0], tensors, (size_t)inputs, NULL);
    if (right == NULL) return NULL;
    Py_DECREF(right);
    if (right != Py_True) Py_RETURN_FALSE;

    for (Py_ssize_t each = 0; each < inputs; each++) {
        PyObject *start = PyObject_Vectorcall(args[1], &tensors[each], 1, NULL);
        if (start == NULL) return NULL;
        starts[each] = PyLong_AsUnsignedLongLong(start);
        Py_DECREF(start);
        if (starts[each] == (uint64_t)-1 && PyErr_Occurred()) return NULL;
        if (starts[each] == 0) Py_RETURN_FALSE;
    }
    const char *parts = PyBytes_AS_STRING(args[3]);
    for (Py_ssize_t each = 0; each < inputs; each++) {
        Part part;
        memcpy(&part, parts + each * (Py_ssize_t)sizeof(Part), sizeof(Part));
        memcpy((char *)(uintptr_t)base + part.offset, (const void *)(uintptr_t)starts[each],
               (size_t)part.nbytes);
    }
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"gather", (PyCFunction)(void (*)(void))gather, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_gather", NULL, 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__gather(void) { return PyModule_Create(&definition); }
