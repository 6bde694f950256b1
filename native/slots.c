/* Writes the ring slot of a step whose inputs are like those of an earlier one, in one call: what
   RingTransport (graphrt/cuda/ring/transport.py) does in Python where this is not built. */
#include "native.h"

/* Its parts, from writers.py beside it. */
enum { RING, NAMES, CHECK, ADDRESS_OF, UNLIKE, MEMORY, PARTS };

/* The offsets of slots of a ring (graphrt/cuda/ring/slots.py). */
typedef struct {
    Py_ssize_t count, free_until, pending, unsure;
} Slots;

/* Whether the next step's slot is free and its number is known; -1 with an error set. */
static int is_ready(PyObject *ring, const Slots *at, unsigned long long *count) {
    PyObject *unsure = in_slot(ring, at->unsure), *step = in_slot(ring, at->count);
    PyObject *free_until = in_slot(ring, at->free_until);
    if (step == NULL || free_until == NULL || unsure == NULL) {
        PyErr_SetString(PyExc_AttributeError, "the ring has no state yet");
        return -1;
    }
    *count = PyLong_AsUnsignedLongLong(step);
    unsigned long long until = PyLong_AsUnsignedLongLong(free_until);
    if (PyErr_Occurred()) return -1;
    return unsure == Py_False && *count < until;
}

/* One copy: of which input, from which of its bytes on, to where in a slot's payload, how many. */
typedef struct {
    uint64_t input, from, to, nbytes;
} Copy;

/* A word of the moves that each step works out: the payload's row at `place`, of `nbytes`, times
   `factor`; or the address of input number `place` plus `nbytes`. See moves.py. */
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
    HOLDER_HEAD
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

/* 0, with the error cleared, where using a wrong input raises such an error; -1 for any other. */
static int unlike(const Writer *self) {
    if (PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(self->of[UNLIKE])) return -1;
        PyErr_Clear();
    }
    return 0;
}

/* Whether an input cannot be read where it is: it has no memory, or is in the memory that the step
   writes. */
static int is_elsewhere(const Writer *self, const uint64_t *starts) {
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

/* The tensors of a step, owned: 1, or 0 where they are not like those before, or -1 with an error. */
static int take_inputs(const Writer *self, PyObject *values, PyObject **tensors, uint64_t *starts) {
    Py_ssize_t inputs = self->inputs;
    for (Py_ssize_t each = 0; each < inputs; each++) {
        PyObject *name = PyTuple_GET_ITEM(self->of[NAMES], each);
        if (PyDict_CheckExact(values))
            Py_XINCREF(tensors[each] = PyDict_GetItemWithError(values, name));
        else
            tensors[each] = PyObject_GetItem(values, name);
        if (tensors[each] == NULL) return unlike(self);
    }
    PyObject *right = PyObject_Vectorcall(self->of[CHECK], tensors, (size_t)inputs, NULL);
    Py_XDECREF(right);
    if (right != Py_True) return unlike(self);
    for (Py_ssize_t each = 0; each < inputs; each++) {
        PyObject *start = PyObject_Vectorcall(self->of[ADDRESS_OF], &tensors[each], 1, NULL);
        if (start == NULL) return unlike(self);
        starts[each] = PyLong_AsUnsignedLongLong(start);
        Py_DECREF(start);
        if (PyErr_Occurred()) return unlike(self);
    }
    return 1;
}

/* Writes the next slot and has it fetched: 0, or -1 with an error. */
static int give_slot(Writer *self, const Moves *moves, const uint64_t *starts,
                     unsigned long long step, PyObject *fetch, int in_graph) {
    PyObject *ring = self->of[RING];
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
    ((uint64_t *)self->base)[self->given] = step + 1;
    set_slot(ring, self->at.unsure, Py_True);
    set_slot(ring, self->at.pending, in_graph ? fetch : Py_None);
    if (in_graph) return 0;
    PyObject *fetched = PyObject_CallNoArgs(fetch);
    if (fetched == NULL) return -1;
    Py_DECREF(fetched);
    if (add_to_slot(ring, self->at.count, 1) < 0) return -1;
    set_slot(ring, self->at.unsure, Py_False);
    return 0;
}

/* 1 where a slot was given, or none is needed; 0 for inputs that are not like those before. */
static int write_inputs(Writer *self, PyObject *values, PyObject *fetch, int in_graph,
                        PyObject **tensors) {
    volatile uint64_t *words = (volatile uint64_t *)self->base;
    uint64_t starts[MOST_INPUTS];
    unsigned long long step;
    /* First, as it may release the GIL: no thread can change an input after this. */
    int ready = is_ready(self->of[RING], &self->at, &step);
    if (ready < 0) return -1;
    if (!ready || words[self->fault] != 0) {
        /* Asks the device, waits for it, or raises what is wrong. */
        PyObject *taken = PyObject_CallMethod(self->of[RING], "take", NULL);
        if (taken == NULL) return -1;
        Py_DECREF(taken);
        if (is_ready(self->of[RING], &self->at, &step) < 0) return -1;
    }
    int alike = take_inputs(self, values, tensors, starts);
    if (alike <= 0) return alike;
    size_t bytes = (size_t)self->inputs * sizeof(uint64_t);
    const Moves *moves = &self->apart;
    if (self->homes != NULL && memcmp(starts, self->homes, bytes) == 0) {
        moves = &self->home;
    } else if (memcmp(starts, self->last, bytes) != 0) {
        if (is_elsewhere(self, starts)) return 0;
        memcpy(self->last, starts, bytes);
    }
    if (self->on_device && moves->count == 0 && !in_graph) return 1;
    return give_slot(self, moves, starts, step, fetch, in_graph) < 0 ? -1 : 1;
}

/* write(values, fetch, in_graph): False, with nothing given, for inputs that are not like them. */
static PyObject *write_slot(PyObject *callable, PyObject *const *args, size_t flags,
                            PyObject *names) {
    if (PyVectorcall_NARGS(flags) != 3 || names != NULL) {
        PyErr_SetString(PyExc_TypeError, "write(values, fetch, in_graph)");
        return NULL;
    }
    /* Owned until all is copied: a mapping may make its tensors when it is asked. */
    PyObject *tensors[MOST_INPUTS] = {NULL};
    Writer *self = (Writer *)callable;
    int done = write_inputs(self, args[0], args[1], args[2] == Py_True, tensors);
    for (Py_ssize_t each = 0; each < self->inputs; each++) Py_XDECREF(tensors[each]);
    if (done < 0) return NULL;
    return PyBool_FromLong(done);
}

static void *copied(PyObject *bytes, size_t size, uint64_t *count) {
    /* Raises TypeError for what is none. */
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
    PyObject *of[PARTS], *copies, *apart, *home, *homes;
    unsigned long long base, slots, first, stride, payload, fault, given, lowest, low, high;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!OOOO(KKKKKKK)(KKK)OOOO", keywords,
                                     &of[RING], &PyTuple_Type, &of[NAMES], &of[CHECK],
                                     &of[ADDRESS_OF], &of[UNLIKE], &of[MEMORY], &base, &slots, &first, &stride, &payload, &fault,
                                     &given, &lowest, &low, &high, &copies, &apart, &home, &homes))
        return NULL;
    if (PyTuple_GET_SIZE(of[NAMES]) > MOST_INPUTS) {
        PyErr_Format(PyExc_ValueError, "at most %d inputs", MOST_INPUTS);
        return NULL;
    }
    PyTypeObject *rings = Py_TYPE(of[RING]);
    Slots at;
    const Slot found[] = {
        {rings, "count", &at.count},
        {rings, "free_until", &at.free_until},
        {rings, "pending", &at.pending},
        {rings, "unsure", &at.unsure},
    };
    if (find_slots(found, COUNT(found)) < 0) return NULL;
    Writer *self = (Writer *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->at = at;
    self->call = write_slot;
    self->inputs = PyTuple_GET_SIZE(of[NAMES]);
    for (int each = 0; each < PARTS; each++) self->of[each] = Py_NewRef(of[each]);
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
    self->on_device = copies == Py_None;
    self->last = PyMem_Malloc(MOST_INPUTS * sizeof(uint64_t));
    if (self->last == NULL) {
        PyErr_NoMemory();
        goto failed;
    }
    /* An address that no input has; 0 is that of an input without memory. */
    memset(self->last, 0xff, MOST_INPUTS * sizeof(uint64_t));
    if (copies != Py_None) {
        self->copy = copied(copies, sizeof(Copy), &self->copies);
        if (self->copy == NULL) goto failed;
    }
    if (take_moves(&self->apart, apart) < 0) goto failed;
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

static void writer_dealloc(PyObject *object) {
    Writer *self = (Writer *)object;
    PyObject_GC_UnTrack(object);
    void *owned[] = {self->last,       self->homes,         self->copy,     self->apart.template,
                     self->apart.late, self->home.template, self->home.late};
    for (size_t each = 0; each < COUNT(owned); each++) PyMem_Free(owned[each]);
    holder_dealloc(object);
}

PyTypeObject WriterType = {
    HOLDER_TYPE("Writer", sizeof(Writer), Py_TPFLAGS_HAVE_VECTORCALL),
    .tp_new = writer_new,
    .tp_dealloc = writer_dealloc,
};
