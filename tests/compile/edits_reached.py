"""Attacks on the key: values that compiled code holds, reached in ways that are easily missed."""

from __future__ import annotations

from tests.compile.edits import MISS, Edit

NAMES = (
    "ITEM",
    "CLASS",
    "SCALE",
    "CACHED",
    "ATTRIBUTE",
    "DISPATCHED",
    "GOT",
    "PACKED",
    "MORE",
    "LISTED",
    "BOUND",
    "LATE",
    "LOCAL",
    "NAMED",
    "FROM",
    "BY_VARS",
    "BY_GLOBALS",
    "GOTTEN",
    "COMPUTED",
    "OF_CLASS",
    "OF_MODULE",
)

REACHED = {
    "main.py": """
import torch
import ops

def forward(x):
    return torch.ops.edits_reached.way(x + 1) * 2

def build():
    return forward
""",
    "ops.py": """
import torch
import torch._inductor.decomposition
import ways

@torch.library.custom_op("edits_reached::way", mutates_args=())
def way(x: torch.Tensor) -> torch.Tensor:
    return ways.way(x)

@way.register_fake
def _(x):
    return torch.empty_like(x)

torch._inductor.decomposition.decompositions[torch.ops.edits_reached.way.default] = ways.way
""",
    "ways.py": """
import array, collections, functools
import torch
from torch import nn
import values as given

class Table:
    def __init__(self):
        self.rows = {"a": given.ITEM}
    def __getitem__(self, key):
        return self.rows[key] * 1.0

class Strategy:
    kind = given.CLASS
    def __init__(self):
        self.scale = given.SCALE
    def apply(self):
        return self.inner() + self.kind
    def inner(self):
        return self.scale
    @functools.cached_property
    def cached(self):
        return self.scale * given.CACHED

class Steps(list):
    def total(self):
        return sum(self) + self.more

def by(x):
    return x
by.factor = given.ATTRIBUTE

@functools.singledispatch
def chosen(n):
    return 0.0
@chosen.register(int)
def _(n):
    return given.DISPATCHED

def add(x, much):
    return x + much

table, strategy, cut = Table(), Strategy(), slice(0, given.CUT)
getter = {"k": given.GOT}.get
numbers = array.array("f", [given.PACKED])
steps = Steps([1.0])
steps.more = given.MORE
several = collections.UserList([given.LISTED])
partial = functools.partial(add, much=given.BOUND)

BY_GLOBALS = given.BY_GLOBALS

class State:
    class_1 = given.OF_CLASS
state = State()
state.by_vars, state.gotten, state.scale_1 = given.BY_VARS, given.GOTTEN, given.COMPUTED

def way(x, *, late=given.LATE):
    y = x * table["a"] + strategy.apply() + strategy.cached
    y = by(y) * by.factor + chosen(1) + getter("k") + numbers[0]
    y = y + x[:, cut].sum(1, keepdim=True) + steps.total() + several[0]
    import values
    import values as renamed
    from values import FROM
    y = y * values.LOCAL + renamed.NAMED + FROM
    y = y + vars(state)["by_vars"] + globals()["BY_GLOBALS"] * getattr(state, "gotten")
    number = x.dim() - 1
    y = y * getattr(state, f"scale_{number}") + getattr(state, f"class_{number}")
    return partial(y) + late + getattr(given, "OF_" + "module".upper())
""",
    "values.py": "\n".join(
        f"{name} = {value}"
        for name, value in {
            **dict.fromkeys(
                NAMES,
                "2.0",
            ),
            "CUT": "1",
        }.items()
    )
    + "\n",
}

WRAPPED = {
    "main.py": """
import torch
import patches

def forward(x):
    return torch.nn.functional.silu(x + 1)

def build():
    return forward
""",
    "patches.py": """
import functools, torch
from torch._inductor.decomposition import decompositions
import values

operator = torch.ops.aten.silu.default
original = decompositions[operator]

@functools.wraps(original)
def named_as_torchs(x):
    return original(x) * values.FACTOR / values.FACTOR

def scaled(x, by):
    return x * torch.sigmoid(x) * by / by

decompositions[operator] = named_as_torchs
if values.BOUND:
    decompositions[operator] = functools.partial(scaled, by=values.BOUND)
""",
    "values.py": "FACTOR = 2.0\nBOUND = 0.0\n",
}

LIMITED = {
    "main.py": """
import values

def forward(x):
    return x * 2 if x.shape[0] < values.LIMIT else x * 3

def build():
    return forward
""",
    "values.py": "LIMIT = 100\n",
}

PROGRAMS = {"reached": REACHED, "wrapped": WRAPPED, "limited": LIMITED}
_CONFIG = "import torch._inductor.config as c; "
_PASS = """
class Pass:
    def __call__(self, nodes): return nodes
    def uuid(self): return 'a pass'
"""

EDITS = [
    *(
        Edit(f"nothing, {name}", name, "hit", around="")
        for name in ("reached", "wrapped", "limited")
    ),
    *(
        Edit(
            f"a value reached by {name.lower()}",
            "reached",
            MISS,
            {"values.py": (f"{name} = 2.0", f"{name} = 3.0")},
        )
        for name in NAMES
    ),
    Edit("a value reached by slice", "reached", MISS, {"values.py": ("CUT = 1", "CUT = 2")}),
    Edit("an item's method", "reached", MISS, {"ways.py": ("[key] * 1.0", "[key] * 2.0")}),
    Edit(
        "a method behind a method",
        "reached",
        MISS,
        {"ways.py": ("return self.scale\n", "return self.scale * 2\n")},
    ),
    Edit(
        "a registered case",
        "reached",
        MISS,
        {"ways.py": ("return given.DISPATCHED", "return given.DISPATCHED + 1")},
    ),
    Edit(
        "a function with the name of torch's",
        "wrapped",
        MISS,
        {"values.py": ("FACTOR = 2.0", "FACTOR = 4.0")},
    ),
    Edit("a partial in a table", "wrapped", MISS, {"values.py": ("BOUND = 0.0", "BOUND = 2.0")}),
    Edit(
        "a branch's limit on sizes",
        "limited",
        MISS,
        {"values.py": ("LIMIT = 100", "LIMIT = 10**12")},
    ),
    Edit(
        "a private setting of Inductor",
        "plain",
        MISS,
        setup=_CONFIG + "c._use_fp64_for_unbacked_floats ^= True",
    ),
    Edit(
        "a pass after fusion",
        "plain",
        MISS,
        setup=f"{_CONFIG}\n{_PASS}\nc._post_fusion_custom_pass = Pass()",
    ),
    Edit(
        "a pass before fusion",
        "plain",
        MISS,
        setup=f"{_CONFIG}\n{_PASS}\nc._pre_fusion_custom_pass = Pass()",
    ),
    Edit(
        "a pass over nodes",
        "plain",
        MISS,
        setup=f"{_CONFIG}\n{_PASS}\nc.post_grad_custom_post_pass = Pass()",
    ),
    Edit(
        "a pass of a backend",
        "plain",
        MISS,
        setup=f"{_PASS}\nfrom torch._inductor.codegen import common\n"
        "common.custom_backend_passes['cpu'] = Pass()",
    ),
    Edit(
        "a partitioner",
        "plain",
        MISS,
        setup=f"{_CONFIG}\n{_PASS}\nc.custom_partitioner_fn = Pass()",
    ),
]
