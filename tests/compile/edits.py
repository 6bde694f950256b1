"""Edits between two starts of a program, and what the second start must find in the cache.

Each program is a few small files; `main.py` has `build()`, which gives what is compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

HIT, MISS = "hit", "miss"


@dataclass(frozen=True)
class Edit:
    """`files` are replaced texts by file: (old, new). `setup` is run before the program is imported
    in the second start, and `setup_after` before it is compiled; `around` is a context manager's
    expression around its compilation and call. `options` and `environment` are the second start's,
    and with `moved` the program lies elsewhere."""

    name: str
    program: str
    must: str
    files: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    setup: str = ""
    setup_after: str = ""
    around: str = ""
    moved: bool = False
    options: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


PLAIN = {
    "main.py": """
from torch import nn
import layers

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = layers.Block(2.0), layers.Other(3.0)
        self.last = nn.Linear(4, 4)
    def forward(self, x):
        return self.second(self.first(x)) + self.last(x)

def build():
    import patches
    return Model()
""",
    "layers.py": """
from torch import nn
import constants
from helpers import decorated, shifted

class Block(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
    def forward(self, x):
        return decorated(shifted(x) * self.scale) * constants.FACTOR

class Other(Block):
    def forward(self, x):
        return x * self.factor()
    def factor(self):
        return self.scale
""",
    "helpers.py": """
import functools
def doubled(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args) * 2
    return call

@doubled
def decorated(x):
    return x.sin()

def shifted(x, by=1.0):
    return x + by
""",
    "constants.py": "FACTOR = 2.0\nUNUSED = 1.0\n",
    "patches.py": "",
    "untraced.py": "NAME = 'a'\n",
}

CUSTOM = {
    "main.py": """
import torch
import ops

def forward(x):
    out = torch.zeros_like(x)
    torch.ops.edits_custom.into(x * 1, out)
    return torch.ops.edits_custom.twice(x + 1) + out * 2

def build():
    return forward
""",
    "ops.py": """
import torch
import kernels

@torch.library.custom_op("edits_custom::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return kernels.twice(x)

@twice.register_fake
def _(x):
    return kernels.shape_of(x)

def setup_context(ctx, inputs, output):
    pass

def backward(ctx, grad):
    return grad * 2

twice.register_autograd(backward, setup_context=setup_context)

@torch.library.custom_op("edits_custom::into", mutates_args=("out",))
def into(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x)
""",
    "kernels.py": """
import torch
FACTOR = 2.0
def twice(x):
    return x * FACTOR

def shape_of(x):
    return torch.empty_like(x)
""",
}

COMPOSITE = {
    "main.py": """
import torch
import bodies

def forward(x):
    return torch.ops.edits_composite.body(x + 1) * 2

def build():
    return forward
""",
    "bodies.py": """
import os
import torch
import constants
import settings
from helpers import helped

LIMIT = 1.5
TENSOR = torch.ones(4)

def made(factor):
    def scaled(x):
        return x * factor
    return scaled

scaled = made(constants.CLOSED)

class Strategy:
    def apply(self, x):
        return x.sin()

strategy = Strategy()

def body(x, by=constants.DEFAULT):
    if os.environ.get("EDITS_MODE") == "other":
        return x.clone()
    y = helped(scaled(x)) + by
    return strategy.apply(y * settings.current.scale).clamp(max=LIMIT) * constants.FACTOR

library = torch.library.Library("edits_composite", "FRAGMENT")
library.define("body(Tensor x) -> Tensor")
library.impl("body", body, "CompositeImplicitAutograd")
""",
    "constants.py": "FACTOR = 2.0\nCLOSED = 3.0\nDEFAULT = 0.5\nUNUSED = 1.0\n",
    "helpers.py": "import math\ndef helped(x):\n    return x - math.sqrt(0.0625)\n",
    "settings.py": """
class Settings:
    scale = 1.0
current = Settings()
""",
}

TRITON = {
    "main.py": """
import torch
import ops

def forward(x):
    return torch.ops.edits_triton.scaled(x + 1) * 2

def build():
    return forward
""",
    "ops.py": """
import torch
from torch.library import triton_op, wrap_triton
from kernels import kernel
import constants

@triton_op("edits_triton::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    if x.device.type == "cpu":
        return x * constants.FACTOR
    out = torch.empty_like(x)
    n = x.numel()
    wrap_triton(kernel)[(n,)](x, out, n)
    return out
""",
    "kernels.py": """
import triton
import triton.language as tl
from device import helper

SCALE = tl.constexpr(2.0)

@triton.autotune(
    configs=[triton.Config({"BLOCK": 64}, num_warps=2), triton.Config({"BLOCK": 128})], key=["n"]
)
@triton.jit
def kernel(x, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out + offsets, helper(tl.load(x + offsets, mask)) * SCALE, mask)
""",
    "device.py": """
import triton
@triton.jit
def helper(x):
    return x * 1.0
""",
    "constants.py": "FACTOR = 2.0\n",
}

OPAQUE = {
    "main.py": """
import torch
import ops

def forward(x):
    out = torch.empty_like(x)
    ops.attention(x + 1, out)
    return out * 2

def build():
    return forward
""",
    "ops.py": """
import torch
import graphrt
import kernels

@graphrt.opaque("edits_opaque::attention", mutates=["out"])
def attention(x: torch.Tensor, out: torch.Tensor) -> None:
    kernels.run(x, out)
""",
    "kernels.py": "def run(x, out):\n    out.copy_(x * 2)\n",
}

ALLOWED = {
    "main.py": """
import torch
import helpers
from constant import chosen
from factories import three, two

def forward(x):
    return two(three(helpers.inner(x) * chosen()))

def build():
    return forward
""",
    "helpers.py": "from one import inner\n",
    "one.py": """
import torch
import constants
@torch.compiler.allow_in_graph
def inner(x):
    return x * constants.FACTOR
""",
    "other.py": """
import torch
@torch.compiler.allow_in_graph
def inner(x):
    return x * 5
""",
    "constants.py": "FACTOR = 2.0\nCHOSEN = 3.0\nCLOSED = 2.0\n",
    "constant.py": """
import torch
import constants
@torch._dynamo.assume_constant_result
def chosen():
    return constants.CHOSEN
""",
    "factories.py": """
import torch
import constants
def made(factor):
    @torch.compiler.allow_in_graph
    def scaled(x):
        return x.sin() * factor
    return scaled
two, three = made(constants.CLOSED), made(3.0)
""",
}

DECOMPOSED = {
    "main.py": """
import torch
import ops

def forward(x):
    return torch.ops.edits_decomposed.twice(x + 1) * 2

def build():
    return forward
""",
    "ops.py": """
import torch
import kernels

@torch.library.custom_op("edits_decomposed::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@twice.register_fake
def _(x):
    return torch.empty_like(x)

import decompositions
""",
    "decompositions.py": """
import torch
import kernels
from torch._inductor.decomposition import register_decomposition

@register_decomposition([torch.ops.edits_decomposed.twice.default])
def twice(x):
    return kernels.twice(x)
""",
    "kernels.py": "def twice(x):\n    return x + x\n",
}

PROGRAMS = {
    "plain": PLAIN,
    "custom": CUSTOM,
    "composite": COMPOSITE,
    "triton": TRITON,
    "opaque": OPAQUE,
    "allowed": ALLOWED,
    "decomposed": DECOMPOSED,
    "autocast": PLAIN,
}
AROUND = {"autocast": "torch.autocast('cpu', torch.bfloat16)"}
"""What is around the first start of a program."""

EDITS = [
    # What is traced.
    Edit("nothing", "plain", HIT),
    Edit("nothing, custom operators", "custom", HIT),
    Edit("nothing, a composite operator", "composite", HIT),
    Edit("nothing, a Triton operator", "triton", HIT),
    Edit("nothing, an opaque operator", "opaque", HIT),
    Edit("nothing, functions that are not looked into", "allowed", HIT),
    Edit("nothing, a decomposition", "decomposed", HIT),
    Edit("a file that nothing calls", "plain", HIT, {"untraced.py": ("'a'", "'b'")}),
    Edit(
        "a constant that nothing reads",
        "plain",
        HIT,
        {"constants.py": ("UNUSED = 1", "UNUSED = 2")},
    ),
    Edit(
        "a constant that is read by traced code",
        "plain",
        MISS,
        {"constants.py": ("FACTOR = 2", "FACTOR = 3")},
    ),
    Edit("a traced function", "plain", MISS, {"helpers.py": ("x + by", "x - by")}),
    Edit("a default argument", "plain", MISS, {"helpers.py": ("by=1.0", "by=2.0")}),
    Edit("a decorated function", "plain", MISS, {"helpers.py": ("x.sin()", "x.cos()")}),
    Edit("a decorator", "plain", MISS, {"helpers.py": ("(*args) * 2", "(*args) * 4")}),
    Edit(
        "a submodule's forward",
        "plain",
        MISS,
        {"layers.py": ("x * self.factor()", "x / self.factor()")},
    ),
    Edit("a submodule's attribute", "plain", MISS, {"main.py": ("Block(2.0)", "Block(4.0)")}),
    Edit(
        "a method of a class replaced by another file",
        "plain",
        MISS,
        {"patches.py": ("", "import layers\nlayers.Other.factor = lambda self: 7.0\n")},
    ),
    Edit(
        "a function of C replaced",
        "composite",
        MISS,
        setup="import math; math.sqrt = lambda x: 9.0",
    ),
    Edit(
        "a function of torch replaced",
        "plain",
        MISS,
        setup="import torch; torch.Tensor.sin = lambda self: self.cos()",
    ),
    # What is called without being traced.
    Edit(
        "the kernel of a custom operator",
        "custom",
        HIT,
        {"ops.py": ("kernels.twice(x)", "kernels.twice(x) + 0")},
    ),
    Edit(
        "what the kernel of a custom operator calls",
        "custom",
        HIT,
        {"kernels.py": ("x * FACTOR", "FACTOR * x")},
    ),
    Edit(
        "a constant of a custom operator's kernel",
        "custom",
        HIT,
        {"kernels.py": ("FACTOR = 2.0", "FACTOR = 3.0")},
    ),
    Edit(
        "a custom operator's fake",
        "custom",
        MISS,
        {"kernels.py": ("torch.empty_like(x)", "x.new_empty(x.shape)")},
    ),
    Edit("a custom operator's gradient", "custom", HIT, {"ops.py": ("grad * 2", "grad * 3")}),
    Edit(
        "what a custom operator writes",
        "custom",
        MISS,
        {"ops.py": ('mutates_args=("out",)', 'mutates_args=("x", "out")')},
    ),
    Edit("what an opaque operator calls", "opaque", HIT, {"kernels.py": ("x * 2", "x * 3")}),
    Edit(
        "whether an opaque operator splits",
        "opaque",
        MISS,
        {"ops.py": ('mutates=["out"]', 'mutates=["out"], splits=False')},
    ),
    Edit("a composite operator's body", "composite", MISS, {"bodies.py": ("x.sin()", "x.cos()")}),
    Edit(
        "what a composite operator calls",
        "composite",
        MISS,
        {"helpers.py": ("x - math", "x + math")},
    ),
    Edit(
        "a constant that a composite operator reads",
        "composite",
        MISS,
        {"constants.py": ("FACTOR = 2", "FACTOR = 3")},
    ),
    Edit(
        "a constant that nothing reads, beside it",
        "composite",
        HIT,
        {"constants.py": ("UNUSED = 1", "UNUSED = 2")},
    ),
    Edit(
        "a closure of a composite operator",
        "composite",
        MISS,
        {"constants.py": ("CLOSED = 3", "CLOSED = 4")},
    ),
    Edit(
        "a default of a composite operator",
        "composite",
        MISS,
        {"constants.py": ("DEFAULT = 0.5", "DEFAULT = 0.25")},
    ),
    Edit(
        "an object that a composite operator reads",
        "composite",
        MISS,
        {"settings.py": ("scale = 1", "scale = 2")},
    ),
    Edit(
        "an object changed before the start",
        "composite",
        MISS,
        setup_after="import settings; settings.current.scale = 3.0",
    ),
    Edit(
        "a method replaced that a composite operator calls",
        "composite",
        MISS,
        setup_after="import bodies; bodies.Strategy.apply = lambda self, x: x.cos()",
    ),
    Edit(
        "a variable of the environment that a composite operator reads",
        "composite",
        MISS,
        environment={"EDITS_MODE": "other"},
    ),
    Edit("a decomposition", "decomposed", MISS, {"kernels.py": ("x + x", "2 * x")}),
    Edit(
        "a function that the graph calls",
        "allowed",
        MISS,
        {"one.py": ("x * constants", "x - constants")},
    ),
    Edit(
        "a constant of a function that the graph calls",
        "allowed",
        MISS,
        {"constants.py": ("FACTOR = 2", "FACTOR = 4")},
    ),
    Edit(
        "a closure of a function that the graph calls",
        "allowed",
        MISS,
        {"constants.py": ("CLOSED = 2", "CLOSED = 4")},
    ),
    Edit(
        "a function of the same name in another module",
        "allowed",
        MISS,
        {"helpers.py": ("from one", "from other")},
    ),
    Edit(
        "a result that is taken for constant",
        "allowed",
        MISS,
        {"constants.py": ("CHOSEN = 3", "CHOSEN = 4")},
    ),
    # Triton.
    Edit(
        "a Triton operator's body", "triton", MISS, {"ops.py": ("x * constants", "x + constants")}
    ),
    Edit(
        "a constant that a Triton operator's body reads",
        "triton",
        MISS,
        {"constants.py": ("2.0", "3.0")},
    ),
    Edit("a Triton kernel", "triton", MISS, {"kernels.py": ("* SCALE", "/ SCALE")}),
    Edit(
        "a constant of a Triton kernel",
        "triton",
        MISS,
        {"kernels.py": ("constexpr(2.0)", "constexpr(3.0)")},
    ),
    Edit(
        "a constant of a Triton kernel, set before the start",
        "triton",
        MISS,
        setup_after="import kernels, triton.language as tl; kernels.SCALE = tl.constexpr(5.0)",
    ),
    Edit(
        "a function that a Triton kernel calls",
        "triton",
        MISS,
        {"device.py": ("x * 1.0", "x * 4.0")},
    ),
    Edit(
        "what a Triton kernel is tuned over",
        "triton",
        MISS,
        {"kernels.py": ("num_warps=2", "num_warps=4")},
    ),
    # What holds around the trace.
    Edit("autocast", "plain", MISS, around="torch.autocast('cpu', torch.bfloat16)"),
    Edit("autocast's dtype", "autocast", MISS, around="torch.autocast('cpu', torch.float16)"),
    Edit(
        "a default dtype",
        "plain",
        MISS,
        setup="import torch; torch.set_default_dtype(torch.float64)",
    ),
    Edit("a default device", "plain", MISS, around="torch.device('cpu')"),
    Edit("inference mode", "plain", MISS, around="torch.inference_mode()"),
    Edit("gradients off around it", "plain", HIT, around="torch.no_grad()"),
    Edit(
        "deterministic algorithms",
        "plain",
        MISS,
        setup="import torch; torch.use_deterministic_algorithms(True)",
    ),
    Edit(
        "uninitialised memory",
        "plain",
        MISS,
        setup="import torch; torch.utils.deterministic.fill_uninitialized_memory = False",
    ),
    Edit(
        "the precision of products",
        "plain",
        MISS,
        setup="import torch; torch.set_float32_matmul_precision('medium')",
    ),
    Edit(
        "a kind of attention switched off",
        "plain",
        MISS,
        setup="import torch; torch.backends.cuda.enable_math_sdp(False)",
    ),
    Edit("oneDNN off", "plain", MISS, setup="import torch; torch._C._set_mkldnn_enabled(False)"),
    Edit("threads", "plain", MISS, setup="import torch; torch.set_num_threads(2)"),
    Edit("the version of torch", "plain", MISS, setup="import torch; torch.__version__ = '9.9.9'"),
    Edit(
        "a setting of Inductor",
        "plain",
        MISS,
        setup="import torch._inductor.config as c; c.epilogue_fusion = False",
    ),
    Edit(
        "a variable that Inductor reads",
        "plain",
        MISS,
        environment={"TORCHINDUCTOR_DETERMINISTIC_EDITS": "1"},
    ),
    Edit(
        "where Inductor's own cache is",
        "plain",
        HIT,
        environment={"TORCHINDUCTOR_CACHE_DIR": "/nowhere"},
    ),
    # Options.
    Edit("an option that changes code", "plain", MISS, options={"autotune": False}),
    Edit("how sizes are traced", "plain", MISS, options={"dynamic_shapes": "unbacked"}),
    Edit("splitting operators", "plain", MISS, options={"splitting_ops": ()}),
    Edit("how pieces are saved", "plain", HIT, options={"save_format": "unpacked"}),
    # Sources that are gone, or never were.
    Edit(
        "a source that is gone",
        "composite",
        HIT,
        setup_after="import bodies, os; os.remove(bodies.__file__)",
    ),
    Edit(
        "a traced source that is gone",
        "plain",
        HIT,
        setup_after="import helpers, os; os.remove(helpers.__file__)",
    ),
    Edit(
        "a body that was made from no file",
        "composite",
        MISS,
        {
            "bodies.py": (
                "strategy = Strategy()",
                "exec('def scaled(x): return x * 5')\nstrategy = Strategy()",
            )
        },
    ),
    Edit("the program moved", "plain", HIT, moved=True),
    Edit("the program moved, a composite operator", "composite", HIT, moved=True),
]

FOUND = {
    "a function of C replaced": "hit, wrong",
    "a function of torch replaced": "hit, wrong",
    "a custom operator's fake": "hit, right",
    "what a custom operator writes": "hit, an error",
    "a composite operator's body": "hit, wrong",
    "what a composite operator calls": "hit, wrong",
    "a constant that a composite operator reads": "hit, wrong",
    "a closure of a composite operator": "hit, wrong",
    "a default of a composite operator": "hit, wrong",
    "an object that a composite operator reads": "hit, wrong",
    "an object changed before the start": "hit, wrong",
    "a method replaced that a composite operator calls": "hit, wrong",
    "a variable of the environment that a composite operator reads": "hit, wrong",
    "a decomposition": "hit, right",
    "a function that the graph calls": "hit, wrong",
    "a constant of a function that the graph calls": "hit, wrong",
    "a closure of a function that the graph calls": "hit, wrong",
    "a Triton operator's body": "hit, wrong",
    "a constant that a Triton operator's body reads": "hit, wrong",
    "a Triton kernel": "hit, right",
    "a constant of a Triton kernel": "hit, right",
    "a constant of a Triton kernel, set before the start": "hit, right",
    "a function that a Triton kernel calls": "hit, right",
    "what a Triton kernel is tuned over": "hit, right",
    "autocast": "hit, right",
    "autocast's dtype": "hit, wrong",
    "inference mode": "hit, right",
    "uninitialised memory": "hit, right",
    "the precision of products": "hit, right",
    "a kind of attention switched off": "hit, right",
    "oneDNN off": "hit, right",
    "threads": "hit, right",
    "a variable that Inductor reads": "hit, right",
    "a body that was made from no file": "hit, wrong",
}
"""What the second start did, where that was not what it must do, before the key was made of all
that is called (with the stand-in of `edits_start.py` for a compiler). The values of a hit are right
where what it had kept does not depend on the edit."""
