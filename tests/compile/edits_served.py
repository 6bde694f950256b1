"""Edits as who serves a model makes them: settings, checkpoint, what is imported by name."""

from __future__ import annotations

from tests.compile.edits import HIT, MISS, Edit

SERVED = {
    "main.py": """
import json, os, pathlib, torch
import net

HERE = pathlib.Path(__file__).parent
LEVEL = os.environ.get("SERVED_LEVEL", "info")

def build():
    config = net.Config(**json.loads((HERE / "config.json").read_text()))
    torch.manual_seed(config.seed)
    model = net.Net(config).to(getattr(torch, config.dtype))
    return model.train(config.training)
""",
    "net.py": """
import dataclasses, enum, os
import torch
from torch import nn
from values import LIMIT, Kind, Table
import values

@dataclasses.dataclass
class Config:
    seed: int
    layers: int
    eps: float
    act: str
    scale: float
    dtype: str
    training: bool
    bias: bool
    window: list
    rope: dict
    name: str
    constant: float

class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.linear = nn.Linear(4, 4, bias=config.bias)
        self.norm = nn.LayerNorm(4, eps=config.eps)
        self.drop = nn.Dropout(0.0)
        self.act = values.ACTS[config.act]
        self.register_buffer("table", torch.arange(4) * config.constant, persistent=False)
    @property
    def factor(self):
        return self.config.scale * values.unit()
    def forward(self, x):
        x = self.norm(self.act(self.linear(x))) * self.factor + self.table
        if self.training:
            x = x + 1
        return self.drop(x).clamp(-LIMIT, LIMIT)

class Net(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.told = config, config.name
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.shift = values.shift_by(3.0)
    def forward(self, x):
        x = x.to(self.layers[0].linear.weight.dtype)
        for layer in self.layers:
            x = x + layer(x)
        for at in self.config.window:
            x = x + x[:, at : at + 1]
        if Kind(self.config.rope["kind"]) is Kind.PLAIN:
            x = x * self.config.rope["base"]
        x = self.shift(x) + Table.rows["b"] + values.Static.of(x) + values.PAIR[1]
        return x * values.helper(x) * values.FLAGS.get("boost", 1.0)
""",
    "values.py": """
import enum, os
import torch.nn.functional as F

LIMIT = 50.0
PAIR = (1, 2.5)
ACTS = {"silu": F.silu, "gelu": F.gelu}
FLAGS = {}

class Kind(enum.Enum):
    PLAIN = "plain"
    OTHER = "other"

class Table:
    rows = {"a": 1.0, "b": 2.0}

class Static:
    @staticmethod
    def of(x, by=0.5):
        return x.shape[-1] * by

class Helper:
    def __init__(self, by):
        self.by = by
    def __call__(self, x):
        return self.by

helper = Helper(1.5)

def unit():
    return float(os.environ.get("SERVED_UNIT", "1.0"))

def shift_by(much):
    return lambda x: x + much
""",
    "config.json": """{"seed": 0, "layers": 2, "eps": 1e-5, "act": "silu", "scale": 0.5,
 "dtype": "float32", "training": false, "bias": true, "window": [0, 2],
 "rope": {"kind": "plain", "base": 1.25}, "name": "a", "constant": 0.1}
""",
}

BOUND = {
    "main.py": """
import functools
import parts

def build():
    return functools.partial(parts.scaled, by=2.0)
""",
    "parts.py": """
def scaled(x, by):
    return x * by + 1
""",
}

OBJECT = {
    "main.py": """
import parts

def build():
    return parts.Scale(2.0)
""",
    "parts.py": """
class Scale:
    def __init__(self, by):
        self.by = by
    def __call__(self, x):
        return x * self.by + 1
""",
}

MADE = {
    "main.py": """
import parts

def build():
    return parts.scaled_by(2.0, [1.0, 3.0])
""",
    "parts.py": """
def scaled_by(by, more):
    def forward(x):
        return x * by + sum(more)
    return forward
""",
}

PROGRAMS = {"served": SERVED, "bound": BOUND, "object": OBJECT, "made": MADE}


def setting(name: str, old: str, new: str, must: str = MISS) -> Edit:
    files = {"config.json": (f'"{name}": {old}', f'"{name}": {new}')}
    return Edit(f"a setting, {name}", "served", must, files)


def value(name: str, old: str, new: str, must: str = MISS) -> Edit:
    return Edit(name, "served", must, {"values.py": (old, new)})


EDITS = [
    Edit("nothing, a served model", "served", HIT),
    Edit("nothing, a partial", "bound", HIT),
    Edit("nothing, an object", "object", HIT),
    Edit("nothing, a closure", "made", HIT),
    Edit("what a partial binds", "bound", MISS, {"main.py": ("by=2.0", "by=3.0")}),
    Edit("what an object holds", "object", MISS, {"main.py": ("2.0", "3.0")}),
    Edit("what a closure holds", "made", MISS, {"main.py": ("2.0", "3.0")}),
    Edit("what a list of a closure holds", "made", MISS, {"main.py": ("3.0]", "4.0]")}),
    setting("seed", "0", "1", HIT),
    setting("layers", "2", "3"),
    setting("eps", "1e-5", "1e-1"),
    setting("act", '"silu"', '"gelu"'),
    setting("scale", "0.5", "0.75"),
    setting("dtype", '"float32"', '"bfloat16"'),
    setting("training", "false", "true"),
    setting("bias", "true", "false"),
    setting("window", "[0, 2]", "[0, 1]"),
    setting("base", "1.25", "1.5"),
    setting("kind", '"plain"', '"other"'),
    setting("name", '"a"', '"b"', HIT),
    setting("constant", "0.1", "0.2", HIT),
    value("a number that is imported by name", "LIMIT = 50.0", "LIMIT = 0.5"),
    value("an item of a tuple", "2.5", "3.5"),
    value("an item of a class's dict", '"b": 2.0', '"b": 4.0'),
    value("an item of a class's dict that nothing reads", '"a": 1.0', '"a": 4.0', HIT),
    value("a default of a static method", "by=0.5", "by=0.25"),
    value("an attribute of an object of a module", "Helper(1.5)", "Helper(1.25)"),
    value("the body of an object's call", "return self.by", "return self.by * 2"),
    value("a closure's body", "x + much", "x - much"),
    value("an item that is new", "FLAGS = {}", 'FLAGS = {"boost": 2.0}'),
    value("a function behind a property", '"1.0"))', '"1.0")) * 2'),
    Edit("what makes a closure", "served", MISS, {"net.py": ("shift_by(3.0)", "shift_by(4.0)")}),
    Edit(
        "a variable of the environment behind a property",
        "served",
        MISS,
        environment={"SERVED_UNIT": "2.0"},
    ),
    Edit("a variable that is not traced", "served", HIT, environment={"SERVED_LEVEL": "debug"}),
    Edit("the served program moved", "served", HIT, moved=True),
    Edit(
        "a number set before the start",
        "served",
        MISS,
        setup_after="import net; net.LIMIT = 0.5",
    ),
    Edit(
        "a number set in the module that it came from",
        "served",
        HIT,
        setup_after="import values; values.LIMIT = 0.5",
    ),
    Edit(
        "a class attribute set before the start",
        "served",
        MISS,
        setup_after="import values; values.Table.rows = {'b': 7.0}",
    ),
    Edit("products in less precision", "served", MISS, around="torch.autocast('cpu')"),
    Edit("another option", "served", MISS, options={"dynamic_shapes": "backed_size_oblivious"}),
    Edit(
        "a method replaced",
        "served",
        MISS,
        setup_after="import values; values.Helper.__call__ = lambda self, x: 0.5",
    ),
]
