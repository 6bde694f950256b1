/* CPython 3.12 and 3.13 report changes of watched dicts, which costs nothing at a read, nor at a step.
   A `Watch` is an iterator with one answer for each step of a runner: that of the iterator `looks`
   in it, but False once a watched dict was changed, until `take`.

   The interpreter calls `dict_changes` before a change, maybe while an exception is pending, and in
   any thread. So it runs no code of a user, keeps no value, and only notes which key of which dict it
   was; Python looks at the values later. */
#include "native.h"

#if HAS_WATCH

/* Of further changed keys only the dict is noted. */
enum { MOST_CHANGES = 1024 };

typedef struct Watch {
    PyObject_HEAD
    PyObject *looks;
    /* address of a dict -> (the dict, or the class that it is of; the dict; keys that count, or None
       for all) */
    PyObject *dicts;
    /* (address, key) of changes that are the forward's own, or make no difference. */
    PyObject *ignored;
    /* (address, key) since the last `take`; the key is None where it may be any. */
    PyObject *changed;
    char has_change;
    /* Something changed that could not be noted. */
    char lost;
    struct Watch *next;
} Watch;

enum { GIVEN, DICT, KEYS, ENTRY };

/* There are eight watchers in a process: all watches share one, taken for the first dict and given
   back after the last. */
static int watcher = -1;
static Watch *live;
/* Set at the interpreter's end, and in a forked child until a watch is aimed again. */
static char is_over;

/* A key whose hash and comparisons are Python's own. */
static int is_plain(PyObject *key) {
    return key != NULL && (PyUnicode_CheckExact(key) || PyLong_CheckExact(key));
}

/* 0, or -1 with an error set where the change could not be noted. */
static int note(Watch *self, PyObject *address, PyObject *key) {
    PyObject *entry = PyDict_GetItemWithError(self->dicts, address);
    if (entry == NULL) return PyErr_Occurred() ? -1 : 0;
    PyObject *keys = PyTuple_GET_ITEM(entry, KEYS);
    if (!is_plain(key)) {
        key = Py_None;
    } else if (keys != Py_None) {
        int counts = PySet_Contains(keys, key);
        if (counts <= 0) return counts;
    }
    PyObject *change = PyTuple_Pack(2, address, key);
    if (change == NULL) return -1;
    int known = PySet_Contains(self->ignored, change);
    if (known == 0) {
        self->has_change = 1;
        if (PySet_GET_SIZE(self->changed) >= MOST_CHANGES) {
            Py_DECREF(change);
            if ((change = PyTuple_Pack(2, address, Py_None)) == NULL) return -1;
        }
        known = PySet_Add(self->changed, change);
    }
    Py_DECREF(change);
    return known < 0 ? -1 : 0;
}

static int dict_changes(PyDict_WatchEvent event, PyObject *dict, PyObject *key, PyObject *value) {
    (void)value;
    if (live == NULL || is_over || event == PyDict_EVENT_DEALLOCATED) return 0;
    PyObject *error = PyErr_GetRaisedException();
    PyObject *address = PyLong_FromVoidPtr(dict);
    for (Watch *each = live; each != NULL; each = each->next) {
        if (address == NULL || note(each, address, key) < 0) {
            PyErr_Clear();
            each->has_change = each->lost = 1;
        }
    }
    Py_XDECREF(address);
    PyErr_SetRaisedException(error);
    return 0;
}

static void forget_changes(Watch *self) {
    if (PySet_Clear(self->changed) < 0) PyErr_Clear();
    self->has_change = self->lost = 0;
}

/* Whether another watch has this dict; -1 with an error set. */
static int is_shared(const Watch *self, PyObject *address) {
    for (Watch *each = live; each != NULL; each = each->next) {
        if (each == self) continue;
        int has = PyDict_Contains(each->dicts, address);
        if (has != 0) return has;
    }
    return 0;
}

/* Let go of a dict that no other watch has; 0, or -1 with an error set. */
static int unwatch(const Watch *self, PyObject *address, PyObject *entry) {
    int shared = is_shared(self, address);
    if (shared != 0) return shared < 0 ? -1 : 0;
    return PyDict_Unwatch(watcher, PyTuple_GET_ITEM(entry, DICT));
}

static void leave(Watch *self) {
    for (Watch **at = &live; *at != NULL; at = &(*at)->next) {
        if (*at == self) {
            *at = self->next;
            break;
        }
    }
    self->next = NULL;
    if (live == NULL && watcher >= 0) {
        if (PyDict_ClearWatcher(watcher) < 0) PyErr_Clear();
        watcher = -1;
    }
}

/* 0, or -1 with an error set where no watcher is left. */
static int join(Watch *self) {
    is_over = 0;
    for (Watch *each = live; each != NULL; each = each->next) {
        if (each == self) return 0;
    }
    if (watcher < 0 && (watcher = PyDict_AddWatcher(dict_changes)) < 0) return -1;
    self->next = live;
    live = self;
    return 0;
}

/* Let go of the dicts that are in `these`, but not in `but`. */
static void unwatch_all(const Watch *self, PyObject *these, PyObject *but) {
    PyObject *address, *entry;
    Py_ssize_t at = 0;
    while (these != NULL && PyDict_Next(these, &at, &address, &entry)) {
        int stays = but == NULL ? 0 : PyDict_Contains(but, address);
        if (stays < 0 || (stays == 0 && unwatch(self, address, entry) < 0)) PyErr_Clear();
    }
}

/* Unwatch all dicts and put `dicts`, empty or NULL, in their place. A pending exception stays. */
static void stop(Watch *self, PyObject *dicts) {
    PyObject *error = PyErr_GetRaisedException(), *before = self->dicts;
    unwatch_all(self, before, NULL);
    self->dicts = dicts;
    leave(self);
    /* Last: what goes with the dicts may run a user's code. */
    Py_XDECREF(before);
    PyErr_SetRaisedException(error);
}

/* False, with an error set, for a watch that the garbage collector has cleared. */
static int is_whole(const Watch *self) {
    if (self->dicts != NULL) return 1;
    PyErr_SetString(PyExc_RuntimeError, "the watch is gone");
    return 0;
}

/* Python 3.13 stores attributes inside of the object while its dict has `ma_values`, and reports no
   change of these. Taking the last attribute out and putting it back makes it an ordinary dict; for
   an empty one a key that is no text does. The GIL is held, so no thread sees the dict in between. */
static int take_from_object(PyObject *dict) {
#if PY_VERSION_HEX >= 0x030D0000
    if (((PyDictObject *)dict)->ma_values == NULL) return 0;
    if (PyDict_GET_SIZE(dict) == 0) {
        PyObject *key = PyObject_CallNoArgs((PyObject *)&PyBaseObject_Type);
        int done = key == NULL ? -1 : PyDict_SetItem(dict, key, Py_None);
        if (done == 0) done = PyDict_DelItem(dict, key);
        Py_XDECREF(key);
        return done;
    }
    PyObject *item = PyObject_CallMethod((PyObject *)&PyDict_Type, "popitem", "O", dict);
    if (item == NULL) return -1;
    int done = PyDict_SetItem(dict, PyTuple_GET_ITEM(item, 0), PyTuple_GET_ITEM(item, 1));
    Py_DECREF(item);
    return done;
#else
    (void)dict;
    return 0;
#endif
}

/* Watch a dict or class, and add its entry to `dicts`; 0, or -1 with an error set. */
static int add(Watch *self, PyObject *dicts, PyObject *given, PyObject *keys) {
    PyObject *dict = PyType_Check(given) ? PyType_GetDict((PyTypeObject *)given) : Py_NewRef(given);
    if (dict == NULL || !PyDict_Check(dict)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a dict or a class can be watched");
        Py_XDECREF(dict);
        return -1;
    }
    int done = -1;
    PyObject *address = PyLong_FromVoidPtr(dict), *entry = NULL;
    if (address != NULL) entry = PyTuple_Pack(ENTRY, given, dict, keys);
    if (entry != NULL && PyDict_SetItem(dicts, address, entry) == 0) {
        int had = PyDict_Contains(self->dicts, address);
        done = had > 0 ? 0 : had;
        if (had == 0 && take_from_object(dict) == 0) done = PyDict_Watch(watcher, dict);
    }
    Py_XDECREF(entry);
    Py_XDECREF(address);
    Py_DECREF(dict);
    return done;
}

/* Forget what is ignored of dicts that go: another dict may get the address of one. */
static int drop_ignored(Watch *self, PyObject *dicts) {
    PyObject *kept = PySet_New(NULL), *iterator = PyObject_GetIter(self->ignored), *change;
    int done = kept == NULL || iterator == NULL ? -1 : 0;
    while (done >= 0 && (change = PyIter_Next(iterator)) != NULL) {
        PyObject *address = PyTuple_GET_ITEM(change, 0);
        int stays = PyDict_Contains(self->dicts, address);
        if (stays > 0) stays = PyDict_Contains(dicts, address);
        done = stays > 0 ? PySet_Add(kept, change) : stays;
        Py_DECREF(change);
    }
    Py_XDECREF(iterator);
    if (done < 0 || PyErr_Occurred()) {
        Py_XDECREF(kept);
        return -1;
    }
    Py_SETREF(self->ignored, kept);
    return 0;
}

static PyObject *watch_aim(PyObject *object, PyObject *entries) {
    Watch *self = (Watch *)object;
    if (!is_whole(self)) return NULL;
    if (!PyDict_CheckExact(entries)) {
        PyErr_SetString(PyExc_TypeError, "a dict of what is watched");
        return NULL;
    }
    PyObject *dicts = PyDict_New(), *given, *keys;
    if (dicts == NULL || join(self) < 0) {
        Py_XDECREF(dicts);
        return NULL;
    }
    Py_ssize_t at = 0;
    PyObject *pair, *unused;
    while (PyDict_Next(entries, &at, &unused, &pair)) {
        if (!PyTuple_CheckExact(pair) || PyTuple_GET_SIZE(pair) < 2) {
            PyErr_SetString(PyExc_TypeError, "pairs of a dict or class and its keys, or None");
            goto failed;
        }
        given = PyTuple_GET_ITEM(pair, 0);
        keys = PyTuple_GET_ITEM(pair, 1);
        if (keys != Py_None && !PyAnySet_CheckExact(keys)) {
            PyErr_SetString(PyExc_TypeError, "keys are a set, or None");
            goto failed;
        }
        if (add(self, dicts, given, keys) < 0) goto failed;
    }
    if (drop_ignored(self, dicts) < 0) goto failed;
    PyObject *before = self->dicts;
    unwatch_all(self, before, dicts);
    self->dicts = dicts;
    forget_changes(self);
    Py_DECREF(before);
    Py_RETURN_NONE;
failed:;
    PyObject *error = PyErr_GetRaisedException();
    unwatch_all(self, dicts, self->dicts);
    Py_DECREF(dicts);
    PyErr_SetRaisedException(error);
    return NULL;
}

/* The changes since the last time as (dict or class, key), the key None where it may be any; None
   where some could not be noted. */
static PyObject *watch_take(PyObject *object, PyObject *unused) {
    (void)unused;
    Watch *self = (Watch *)object;
    if (!is_whole(self)) return NULL;
    PyObject *taken = PyList_New(0), *iterator = PyObject_GetIter(self->changed), *change;
    int failed = taken == NULL || iterator == NULL;
    while (!failed && (change = PyIter_Next(iterator)) != NULL) {
        PyObject *entry = PyDict_GetItemWithError(self->dicts, PyTuple_GET_ITEM(change, 0));
        PyObject *pair = NULL;
        if (entry != NULL)
            pair = PyTuple_Pack(2, PyTuple_GET_ITEM(entry, GIVEN), PyTuple_GET_ITEM(change, 1));
        failed = entry == NULL ? PyErr_Occurred() != NULL
                               : pair == NULL || PyList_Append(taken, pair) < 0;
        Py_XDECREF(pair);
        Py_DECREF(change);
    }
    Py_XDECREF(iterator);
    if (failed || PyErr_Occurred()) {
        Py_XDECREF(taken);
        return NULL;
    }
    if (self->lost) Py_SETREF(taken, Py_NewRef(Py_None));
    forget_changes(self);
    return taken;
}

/* ignore(dict or class, key) */
static PyObject *watch_ignore(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    Watch *self = (Watch *)object;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "ignore(a dict or class, a key)");
        return NULL;
    }
    PyObject *dict =
        PyType_Check(args[0]) ? PyType_GetDict((PyTypeObject *)args[0]) : Py_NewRef(args[0]);
    PyObject *address = dict == NULL ? NULL : PyLong_FromVoidPtr(dict);
    PyObject *change = NULL;
    if (address != NULL) change = PyTuple_Pack(2, address, is_plain(args[1]) ? args[1] : Py_None);
    int done = change == NULL ? -1 : PySet_Add(self->ignored, change);
    Py_XDECREF(change);
    Py_XDECREF(address);
    Py_XDECREF(dict);
    if (done < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *watch_stop(PyObject *object, PyObject *unused) {
    (void)unused;
    Watch *self = (Watch *)object;
    PyObject *empty = PyDict_New();
    if (empty == NULL) return NULL;
    stop(self, empty);
    PySet_Clear(self->ignored);
    forget_changes(self);
    Py_RETURN_NONE;
}

static PyObject *watch_over(PyObject *unused, PyObject *also_unused) {
    (void)unused, (void)also_unused;
    is_over = 1;
    Py_RETURN_NONE;
}

static PyObject *watch_next(PyObject *object) {
    Watch *self = (Watch *)object;
    if (self->has_change) return Py_NewRef(Py_False);
    if (self->looks == NULL) return NULL;
    /* Owned, as the call may replace it. */
    PyObject *looks = Py_NewRef(self->looks);
    PyObject *answer = Py_TYPE(looks)->tp_iternext(looks);
    Py_DECREF(looks);
    return answer;
}

static PyObject *get_looks(PyObject *object, void *unused) {
    (void)unused;
    PyObject *looks = ((Watch *)object)->looks;
    return Py_NewRef(looks == NULL ? Py_None : looks);
}

static int set_looks(PyObject *object, PyObject *value, void *unused) {
    (void)unused;
    if (value == NULL || !PyIter_Check(value)) {
        PyErr_SetString(PyExc_TypeError, "looks are an iterator");
        return -1;
    }
    Py_XSETREF(((Watch *)object)->looks, Py_NewRef(value));
    return 0;
}

static PyObject *get_has_change(PyObject *object, void *unused) {
    (void)unused;
    return PyBool_FromLong(((Watch *)object)->has_change);
}

static PyObject *get_count(PyObject *object, void *unused) {
    (void)unused;
    PyObject *dicts = ((Watch *)object)->dicts;
    return PyLong_FromSsize_t(dicts == NULL ? 0 : PyDict_GET_SIZE(dicts));
}

static int watch_traverse(PyObject *object, visitproc visit, void *arg) {
    Watch *self = (Watch *)object;
    Py_VISIT(self->looks);
    Py_VISIT(self->dicts);
    return 0;
}

static int watch_clear(PyObject *object) {
    Watch *self = (Watch *)object;
    if (self->dicts != NULL) stop(self, NULL);
    Py_CLEAR(self->looks);
    return 0;
}

static void watch_dealloc(PyObject *object) {
    Watch *self = (Watch *)object;
    PyObject_GC_UnTrack(object);
    watch_clear(object);
    Py_CLEAR(self->ignored);
    Py_CLEAR(self->changed);
    Py_TYPE(object)->tp_free(object);
}

static PyObject *watch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *looks;
    static char *keywords[] = {"looks", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", keywords, &looks)) return NULL;
    if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
        PyErr_SetString(PyExc_RuntimeError, "dicts are watched in the main interpreter alone");
        return NULL;
    }
    Watch *self = (Watch *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->dicts = PyDict_New();
    self->ignored = PySet_New(NULL);
    self->changed = PySet_New(NULL);
    if (self->dicts == NULL || self->ignored == NULL || self->changed == NULL ||
        set_looks((PyObject *)self, looks, NULL) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyMethodDef methods[] = {
    {"aim", watch_aim, METH_O,
     "Watch these (dict or class, keys or None), by whatever key, and nothing else."},
    {"take", watch_take, METH_NOARGS, "What has changed since the last time."},
    {"ignore", (PyCFunction)(void (*)(void))watch_ignore, METH_FASTCALL, "A key of one dict."},
    {"stop", watch_stop, METH_NOARGS, "Watch nothing."},
    {"over", watch_over, METH_NOARGS | METH_STATIC, "No watch notes anything until one is aimed."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef attributes[] = {
    {"looks", get_looks, set_looks, "The iterator that it is over.", NULL},
    {"has_change", get_has_change, NULL, "Whether something has changed.", NULL},
    {"count", get_count, NULL, "How many dicts are watched.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject WatchType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "graphrt.core.base._native.Watch",
    .tp_basicsize = sizeof(Watch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_traverse = watch_traverse,
    .tp_clear = watch_clear,
    .tp_dealloc = watch_dealloc,
    .tp_new = watch_new,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = watch_next,
    .tp_methods = methods,
    .tp_getset = attributes,
};

#endif
