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

/* Where a ring keeps what it remembers between two steps: its slots of these names (see ring.py),
   read and written in place, as the interpreter does. */
typedef struct {
    Py_ssize_t count, free_until, pending, unsure;
} Slots;

static PyObject **slot_of(PyObject *ring, Py_ssize_t offset) {
    return (PyObject **)((char *)ring + offset);
}

static void set_slot(PyObject *ring, Py_ssize_t offset, PyObject *value) {
    PyObject **slot = slot_of(ring, offset), *before = *slot;
    *slot = Py_NewRef(value);
    Py_XDECREF(before);
}

static Py_ssize_t offset_of(PyObject *ring, const char *name) {
    PyObject *found = PyObject_GetAttrString((PyObject *)Py_TYPE(ring), name);
    if (found == NULL) return -1;
    Py_ssize_t offset = -1;
    if (Py_IS_TYPE(found, &PyMemberDescr_Type) &&
        ((PyMemberDescrObject *)found)->d_member->type == T_OBJECT_EX)
        offset = ((PyMemberDescrObject *)found)->d_member->offset;
    else
        PyErr_Format(PyExc_TypeError, "%s is no slot of %s", name, Py_TYPE(ring)->tp_name);
    Py_DECREF(found);
    return offset;
}

static int find_slots(PyObject *ring, Slots *at) {
    if ((at->count = offset_of(ring, "count")) < 0) return -1;
    if ((at->free_until = offset_of(ring, "free_until")) < 0) return -1;
    if ((at->pending = offset_of(ring, "pending")) < 0) return -1;
    return (at->unsure = offset_of(ring, "unsure")) < 0 ? -1 : 0;
}

/* Whether the next step's slot is free and its number is known; -1 with an error set. */
static int is_ready(PyObject *ring, const Slots *at, unsigned long long *count) {
    PyObject *unsure = *slot_of(ring, at->unsure), *step = *slot_of(ring, at->count);
    PyObject *free_until = *slot_of(ring, at->free_until);
    if (step == NULL || free_until == NULL || unsure == NULL) {
        PyErr_SetString(PyExc_AttributeError, "the ring has no state yet");
        return -1;
    }
    *count = PyLong_AsUnsignedLongLong(step);
    unsigned long long until = PyLong_AsUnsignedLongLong(free_until);
    if (PyErr_Occurred()) return -1;
    return unsure == Py_False && *count < until;
}

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
    Slots at;
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
    PyObject *ring = self->ring;
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

    unsigned long long step;
    int ready = is_ready(ring, &self->at, &step);
    if (ready < 0) return NULL;
    if (!ready || words[self->fault] != 0) {
        /* Asks the device, waits for it, or raises what is wrong. */
        PyObject *taken = PyObject_CallMethod(ring, "take", NULL);
        if (taken == NULL) return NULL;
        Py_DECREF(taken);
        if (is_ready(ring, &self->at, &step) < 0) return NULL;
    }
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
    set_slot(ring, self->at.unsure, Py_True);
    set_slot(ring, self->at.pending, in_graph ? args[1] : Py_None);
    if (in_graph) Py_RETURN_TRUE;
    PyObject *fetched = PyObject_CallNoArgs(args[1]);
    if (fetched == NULL) return NULL;
    Py_DECREF(fetched);
    PyObject *next = PyLong_FromUnsignedLongLong(step + 1);
    if (next == NULL) return NULL;
    set_slot(ring, self->at.count, next);
    Py_DECREF(next);
    set_slot(ring, self->at.unsure, Py_False);
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
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!OOOO(KKKKKKK)(KKK)SOOO", keywords,
                                     &ring, &PyTuple_Type, &names, &check, &address_of, &unlike,
                                     &memory, &base, &slots, &first, &stride, &payload, &fault,
                                     &given, &lowest, &low, &high, &copies, &apart, &home, &homes))
        return NULL;
    if (PyTuple_GET_SIZE(names) > MOST_INPUTS) {
        PyErr_Format(PyExc_ValueError, "at most %d inputs", MOST_INPUTS);
        return NULL;
    }
    Slots at;
    if (find_slots(ring, &at) < 0) return NULL;
    Writer *self = (Writer *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->at = at;
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
    if (PyType_Ready(&WriterType) < 0) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    if (PyModule_AddObjectRef(module, "Writer", (PyObject *)&WriterType) < 0 ||
        PyModule_AddIntConstant(module, "MOST_INPUTS", MOST_INPUTS) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
