/* What writes the slot of a step whose inputs are like those of an earlier one, in one call: what
   graphrt/core/inputs/transfer/alike.py does in Python where this is not built (see setup.py).

   Python's own headers and none of torch's: addresses come from Tensor.data_ptr and the comparison
   from torch's TensorGuards, both passed in, so one build serves every version of torch. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stdint.h>
#include <string.h>

enum { MOST_INPUTS = 64 };

/* RingState: what a ring of slots remembers between two steps; see ring.py, which extends it. */

typedef struct {
    PyObject_HEAD
    unsigned long long count, free_until;
    char unsure;
    PyObject *pending;
} RingState;

static PyMemberDef ring_members[] = {
    {"count", T_ULONGLONG, offsetof(RingState, count), 0, NULL},
    {"free_until", T_ULONGLONG, offsetof(RingState, free_until), 0, NULL},
    {"unsure", T_BOOL, offsetof(RingState, unsure), 0, NULL},
    {"pending", T_OBJECT, offsetof(RingState, pending), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static int ring_traverse(RingState *self, visitproc visit, void *arg) {
    Py_VISIT(self->pending);
    return 0;
}

static int ring_clear(RingState *self) {
    Py_CLEAR(self->pending);
    return 0;
}

static void ring_dealloc(RingState *self) {
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->pending);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject RingStateType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "graphrt.core.inputs.transfer._native.RingState",
    .tp_basicsize = sizeof(RingState),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_members = ring_members,
    .tp_traverse = (traverseproc)ring_traverse,
    .tp_clear = (inquiry)ring_clear,
    .tp_dealloc = (destructor)ring_dealloc,
};

/* Bytes of an input: of which one, from which byte of it, and where they go in a slot's payload. */
typedef struct {
    uint64_t input, from, to, nbytes;
} Copy;

/* A word of the moves that is known only at a step. Of a row that is repeated: which word, the
   row's place in the payload, its bytes, and what makes a word of it. Of an input's address: which
   word, of which input, and how far after its start. */
typedef struct {
    uint64_t word, place, nbytes, factor;
} Late;

typedef struct {
    uint64_t count, words;
    uint64_t *template;
    uint64_t lates;
    Late *late;
} Moves;

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *ring, *names, *check, *address_of, *unlike, *memory;
    char *base;
    uint64_t slots, first, stride, payload, fault, given, lowest, low, high;
    Py_ssize_t inputs;
    uint64_t *last, *homes;
    uint64_t copies;
    Copy *copy;
    Moves apart, home;
    char on_device;
} Writer;

static PyObject *no(Writer *self) {
    if (PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(self->unlike)) return NULL;
        PyErr_Clear();
    }
    Py_RETURN_FALSE;
}

static int in_slab(const Writer *self, const uint64_t *starts) {
    for (Py_ssize_t each = 0; each < self->inputs; each++) {
        uint64_t start = starts[each];
        if (start < self->lowest || (self->low <= start && start < self->high)) return 1;
    }
    return 0;
}

static void write_moves(const Writer *self, const Moves *moves, const uint64_t *starts,
                        uint64_t *header, const char *payload) {
    memcpy(header + 2, moves->template, moves->words * sizeof(uint64_t));
    for (uint64_t each = 0; each < moves->lates; each++) {
        const Late *late = &moves->late[each];
        uint64_t value = 0;
        if (self->on_device) {
            value = starts[late->place] + late->nbytes;
        } else {
            /* Little-endian, as the device is. */
            memcpy(&value, payload + late->place, late->nbytes);
            value *= late->factor;
        }
        header[2 + late->word] = value;
    }
}

/* write(values, fetch, in_graph): False, with nothing given, for inputs that are not like them. */
static PyObject *write_slot(PyObject *callable, PyObject *const *args, size_t flags,
                            PyObject *names) {
    Writer *self = (Writer *)callable;
    RingState *ring = (RingState *)self->ring;
    if (PyVectorcall_NARGS(flags) != 3 || names != NULL) {
        PyErr_SetString(PyExc_TypeError, "write(values, fetch, in_graph)");
        return NULL;
    }
    int in_graph = args[2] == Py_True;
    volatile uint64_t *words = (volatile uint64_t *)self->base;
    Py_ssize_t inputs = self->inputs;
    PyObject *tensors[MOST_INPUTS] = {NULL};
    uint64_t starts[MOST_INPUTS];

    for (Py_ssize_t each = 0; each < inputs; each++) {
        PyObject *name = PyTuple_GET_ITEM(self->names, each);
        if (PyDict_CheckExact(args[0]))
            /* Owned, as one may be replaced while others are looked at. */
            Py_XINCREF(tensors[each] = PyDict_GetItemWithError(args[0], name));
        else
            tensors[each] = PyObject_GetItem(args[0], name);
        if (tensors[each] == NULL) {
            while (each--) Py_DECREF(tensors[each]);
            return no(self);
        }
    }
    PyObject *right = PyObject_Vectorcall(self->check, tensors, (size_t)inputs, NULL);
    int alike = right == Py_True;
    Py_XDECREF(right);
    for (Py_ssize_t each = 0; alike && each < inputs; each++) {
        PyObject *start = PyObject_Vectorcall(self->address_of, &tensors[each], 1, NULL);
        alike = start != NULL;
        if (alike) {
            starts[each] = PyLong_AsUnsignedLongLong(start);
            alike = !PyErr_Occurred();
            Py_DECREF(start);
        }
    }
    for (Py_ssize_t each = 0; each < inputs; each++) Py_DECREF(tensors[each]);
    if (!alike) return no(self);

    size_t bytes = (size_t)inputs * sizeof(uint64_t);
    const Moves *moves = &self->apart;
    if (self->homes != NULL && memcmp(starts, self->homes, bytes) == 0)
        moves = &self->home;
    else if (memcmp(starts, self->last, bytes) != 0) {
        if (in_slab(self, starts)) Py_RETURN_FALSE;
        memcpy(self->last, starts, bytes);
    }
    if (self->on_device && moves->count == 0 && !in_graph) Py_RETURN_TRUE;

    if (ring->unsure || words[self->fault] != 0 || ring->count >= ring->free_until) {
        /* Asks the device, waits for it, or raises what is wrong. */
        PyObject *taken = PyObject_CallMethod(self->ring, "take", NULL);
        if (taken == NULL) return NULL;
        Py_DECREF(taken);
    }
    uint64_t step = ring->count;
    char *slot = self->base + self->first + step % self->slots * self->stride;
    char *payload = slot + self->payload;
    for (uint64_t each = 0; each < self->copies; each++) {
        const Copy *copy = &self->copy[each];
        const char *from = (const char *)(uintptr_t)starts[copy->input];
        memcpy(payload + copy->to, from + copy->from, copy->nbytes);
    }
    uint64_t *header = (uint64_t *)slot;
    write_moves(self, moves, starts, header, payload);
    header[0] = step;
    header[1] = moves->count;
    words[self->given] = step + 1;
    ring->unsure = 1;
    PyObject *before = ring->pending;
    if (in_graph) {
        Py_INCREF(args[1]);
        ring->pending = args[1];
        Py_XDECREF(before);
        Py_RETURN_TRUE;
    }
    Py_INCREF(Py_None);
    ring->pending = Py_None;
    Py_XDECREF(before);
    PyObject *fetched = PyObject_CallNoArgs(args[1]);
    if (fetched == NULL) return NULL;
    Py_DECREF(fetched);
    ring->count = step + 1;
    ring->unsure = 0;
    Py_RETURN_TRUE;
}

static void *copied(PyObject *bytes, size_t size, uint64_t *count) {
    char *from;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(bytes, &from, &length) < 0) return NULL;
    *count = (uint64_t)length / size;
    void *into = PyMem_Malloc(length ? (size_t)length : 1);
    if (into == NULL) return PyErr_NoMemory();
    return memcpy(into, from, (size_t)length);
}

static int take_moves(Moves *into, PyObject *given) {
    PyObject *template, *late;
    unsigned long long count;
    if (!PyArg_ParseTuple(given, "KSS", &count, &template, &late)) return -1;
    into->count = count;
    into->template = copied(template, sizeof(uint64_t), &into->words);
    into->late = copied(late, sizeof(Late), &into->lates);
    return into->template == NULL || into->late == NULL ? -1 : 0;
}

static PyObject *writer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"ring",   "names",  "check",  "address_of", "unlike", "memory",
                               "places", "bounds", "copies", "apart",      "home",   "homes", NULL};
    PyObject *ring, *names, *check, *address_of, *unlike, *memory, *copies, *apart, *home, *homes;
    unsigned long long base, slots, first, stride, payload, fault, given, lowest, low, high;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!OOOO(KKKKKKK)(KKK)SOOO", keywords,
                                     &RingStateType, &ring, &PyTuple_Type, &names, &check,
                                     &address_of, &unlike, &memory, &base, &slots, &first, &stride,
                                     &payload, &fault, &given, &lowest, &low, &high, &copies,
                                     &apart, &home, &homes))
        return NULL;
    if (PyTuple_GET_SIZE(names) > MOST_INPUTS) {
        PyErr_Format(PyExc_ValueError, "at most %d inputs", MOST_INPUTS);
        return NULL;
    }
    Writer *self = (Writer *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->call = write_slot;
    self->inputs = PyTuple_GET_SIZE(names);
    self->ring = Py_NewRef(ring);
    self->names = Py_NewRef(names);
    self->check = Py_NewRef(check);
    self->address_of = Py_NewRef(address_of);
    self->unlike = Py_NewRef(unlike);
    self->memory = Py_NewRef(memory);
    self->base = (char *)(uintptr_t)base;
    self->slots = slots;
    self->first = first;
    self->stride = stride;
    self->payload = payload;
    self->fault = fault;
    self->given = given;
    self->lowest = lowest;
    self->low = low;
    self->high = high;
    self->on_device = high > low;
    self->last = PyMem_Malloc(MOST_INPUTS * sizeof(uint64_t));
    if (self->last == NULL) {
        PyErr_NoMemory();
        goto failed;
    }
    /* Where no input can be: not 0, which is the address of one without memory. */
    memset(self->last, 0xff, MOST_INPUTS * sizeof(uint64_t));
    self->copy = copied(copies, sizeof(Copy), &self->copies);
    if (self->copy == NULL || take_moves(&self->apart, apart) < 0) goto failed;
    if (homes != Py_None) {
        uint64_t count = 0;
        self->homes = copied(homes, sizeof(uint64_t), &count);
        if (self->homes == NULL || take_moves(&self->home, home) < 0) goto failed;
        if (count != (uint64_t)self->inputs) {
            PyErr_SetString(PyExc_ValueError, "one home for each input");
            goto failed;
        }
    }
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static int writer_traverse(Writer *self, visitproc visit, void *arg) {
    Py_VISIT(self->ring);
    Py_VISIT(self->check);
    Py_VISIT(self->memory);
    return 0;
}

static int writer_clear(Writer *self) {
    Py_CLEAR(self->ring);
    Py_CLEAR(self->names);
    Py_CLEAR(self->check);
    Py_CLEAR(self->address_of);
    Py_CLEAR(self->unlike);
    Py_CLEAR(self->memory);
    return 0;
}

static void writer_dealloc(Writer *self) {
    PyObject_GC_UnTrack(self);
    writer_clear(self);
    void *owned[] = {self->last,       self->homes,         self->copy,     self->apart.template,
                     self->apart.late, self->home.template, self->home.late};
    for (size_t each = 0; each < sizeof(owned) / sizeof(*owned); each++) PyMem_Free(owned[each]);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject WriterType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "graphrt.core.inputs.transfer._native.Writer",
    .tp_basicsize = sizeof(Writer),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = writer_new,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Writer, call),
    .tp_traverse = (traverseproc)writer_traverse,
    .tp_clear = (inquiry)writer_clear,
    .tp_dealloc = (destructor)writer_dealloc,
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", NULL, -1, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) {
    if (PyType_Ready(&RingStateType) < 0 || PyType_Ready(&WriterType) < 0) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    if (PyModule_AddObjectRef(module, "RingState", (PyObject *)&RingStateType) < 0 ||
        PyModule_AddObjectRef(module, "Writer", (PyObject *)&WriterType) < 0 ||
        PyModule_AddIntConstant(module, "MOST_INPUTS", MOST_INPUTS) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
