/* The module that setup.py compiles; its TWINS, TRUST and SOURCES say what it was made from: see
   graphrt/core/base/native_sources.py. */
#include "native.h"

int holder_traverse(PyObject *self, visitproc visit, void *arg) {
    for (int each = 0; each < MOST_PARTS; each++) Py_VISIT(((Holder *)self)->of[each]);
    return 0;
}

int holder_clear(PyObject *self) {
    for (int each = 0; each < MOST_PARTS; each++) Py_CLEAR(((Holder *)self)->of[each]);
    return 0;
}

void holder_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    holder_clear(self);
    Py_TYPE(self)->tp_free(self);
}

int find_slots(const Slot *slots, size_t count) {
    for (size_t each = 0; each < count; each++) {
        *slots[each].into = offset_of(slots[each].type, slots[each].name);
        if (*slots[each].into < 0) return -1;
    }
    return 0;
}

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", NULL, -1, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) {
    struct {
        const char *name;
        PyTypeObject *type;
    } types[] = {
        {"Writer", &WriterType},
        {"Replay", &ReplayType},
        {"Path", &PathType},
        {"Glances", &GlancesType},
#if HAS_WATCH
        {"Watch", &WatchType},
#endif
    };
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    if (prepare_replay() < 0 || prepare_path() < 0) goto failed;
    for (size_t each = 0; each < COUNT(types); each++) {
        if (PyType_Ready(types[each].type) < 0 ||
            PyModule_AddObjectRef(module, types[each].name, (PyObject *)types[each].type) < 0)
            goto failed;
    }
    if (PyModule_AddIntConstant(module, "MOST_INPUTS", MOST_INPUTS) == 0 &&
        PyModule_AddStringConstant(module, "TWINS", TWINS) == 0 &&
        PyModule_AddStringConstant(module, "TRUST", TRUST) == 0 &&
        PyModule_AddStringConstant(module, "SOURCES", SOURCES) == 0)
        return module;
failed:
    Py_DECREF(module);
    return NULL;
}
