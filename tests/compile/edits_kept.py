"""Edits that change no computation: each start traces, and none may compile again."""

from __future__ import annotations

from tests.compile.edits import HIT, Edit


def kept(name: str, program: str, file: str, old: str, new: str) -> Edit:
    return Edit(f"{name} ({program})", program, HIT, {file: (old, new)})


EDITS = [
    # Comments.
    kept(
        "a comment in the forward",
        "plain",
        "main.py",
        "return self.second",
        "# why\n        return self.second",
    ),
    kept("a comment above the class", "plain", "main.py", "class Model", "# A model.\nclass Model"),
    kept(
        "a comment behind a line",
        "plain",
        "helpers.py",
        "return x + by",
        "return x + by  # shifted",
    ),
    kept(
        "a comment in a composite body",
        "composite",
        "bodies.py",
        "    y = helped",
        "    # why\n    y = helped",
    ),
    kept(
        "a comment in a fake implementation",
        "custom",
        "kernels.py",
        "return torch.empty_like",
        "# why\n    return torch.empty_like",
    ),
    kept(
        "a comment in an opaque operator",
        "opaque",
        "ops.py",
        "    kernels.run",
        "    # why\n    kernels.run",
    ),
    kept(
        "a comment in a decomposition",
        "decomposed",
        "kernels.py",
        "return x + x",
        "# why\n    return x + x",
    ),
    kept(
        "a comment in a function of the graph",
        "allowed",
        "one.py",
        "return x",
        "# why\n    return x",
    ),
    kept(
        "a comment in a Triton kernel",
        "triton",
        "kernels.py",
        "    mask = offsets",
        "    # why\n    mask = offsets",
    ),
    kept(
        "a comment in what a Triton kernel calls",
        "triton",
        "device.py",
        "return x",
        "# why\n    return x",
    ),
    # Docstrings.
    kept(
        "a docstring of the forward",
        "plain",
        "main.py",
        "def forward(self, x):\n",
        'def forward(self, x):\n        """It computes."""\n',
    ),
    kept(
        "a docstring of a helper",
        "plain",
        "helpers.py",
        "def shifted(x, by=1.0):\n",
        'def shifted(x, by=1.0):\n    """It shifts."""\n',
    ),
    kept(
        "a docstring of a module", "plain", "layers.py", "\nfrom torch", '"""Layers."""\nfrom torch'
    ),
    kept(
        "a docstring of a composite body",
        "composite",
        "helpers.py",
        "(x):\n",
        '(x):\n    """It helps."""\n',
    ),
    kept(
        "a docstring of a fake implementation",
        "custom",
        "kernels.py",
        "shape_of(x):\n",
        'shape_of(x):\n    """A shape."""\n',
    ),
    kept(
        "a docstring of a decomposition",
        "decomposed",
        "kernels.py",
        "(x):\n",
        '(x):\n    """Twice."""\n',
    ),
    kept(
        "a docstring of a Triton kernel", "triton", "device.py", "(x):\n", '(x):\n    """One."""\n'
    ),
    # Formatting.
    kept("blank lines", "plain", "helpers.py", "def shifted", "\n\n\ndef shifted"),
    kept(
        "a line that is broken",
        "plain",
        "main.py",
        "return self.second(self.first(x)) +",
        "return self.second(\n            self.first(x)\n        ) +",
    ),
    kept(
        "brackets",
        "composite",
        "helpers.py",
        "return x - math.sqrt(0.0625)",
        "return (x - (math.sqrt(0.0625)))",
    ),
    kept("another way to write a number", "composite", "helpers.py", "0.0625", "6.25e-2"),
    kept(
        "annotations",
        "plain",
        "helpers.py",
        "def shifted(x, by=1.0)",
        "def shifted(x: 'Tensor', by: float = 1.0) -> 'Tensor'",
    ),
    kept(
        "lines of a Triton kernel",
        "triton",
        "kernels.py",
        "helper(tl.load(x + offsets, mask))",
        "helper(\n        tl.load(x + offsets, mask)\n    )",
    ),
    # Helpers.
    kept(
        "a local variable's name",
        "composite",
        "bodies.py",
        "y = helped(scaled(x)) + by\n    return strategy.apply(y *",
        "z = helped(scaled(x)) + by\n    return strategy.apply(z *",
    ),
    kept(
        "a helper that is new and unused",
        "plain",
        "helpers.py",
        "def shifted",
        "def unused(x):\n    return x\n\ndef shifted",
    ),
    kept(
        "a part that becomes a helper",
        "plain",
        "helpers.py",
        "    return x + by",
        "    return added(x, by)\n\ndef added(x, by):\n    return x + by",
    ),
    kept(
        "a helper that becomes a part", "plain", "layers.py", "x * self.factor()", "x * self.scale"
    ),
    kept("an import that is new", "composite", "bodies.py", "import os\n", "import os, json\n"),
    kept(
        "a part that becomes a function below it",
        "plain",
        "helpers.py",
        "def decorated(x):\n    return x.sin()",
        "def decorated(x):\n    return sine(x)\n\ndef sine(x):\n    return x.sin()",
    ),
    # Constants, configurations, closures.
    kept(
        "a constant by another name",
        "plain",
        "constants.py",
        "FACTOR = 2.0",
        "_HALF = 1.0\nFACTOR = 2.0 * _HALF",
    ),
    kept(
        "a constant's kind, of the same value",
        "composite",
        "constants.py",
        "CLOSED = 3.0",
        "CLOSED = float(3)",
    ),
    kept(
        "an attribute that nothing reads",
        "plain",
        "layers.py",
        "self.scale = scale",
        "self.scale, self.told = scale, 'a'",
    ),
    kept("an option that nothing reads", "served", "config.json", '"name": "a"', '"name": "c"'),
    kept(
        "an attribute of settings that nothing reads",
        "composite",
        "settings.py",
        "scale = 1.0",
        "scale = 1.0\n    other = 2.0",
    ),
    kept("a closure of the same value", "made", "main.py", "2.0", "1.0 + 1.0"),
    kept(
        "the log of a kernel that is only run",
        "opaque",
        "kernels.py",
        "out.copy_",
        "print(end='')\n    out.copy_",
    ),
]
