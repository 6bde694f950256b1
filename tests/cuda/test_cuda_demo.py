"""The demo on an NVIDIA GPU: it takes the GPU by itself, and every mode equals padded eager."""

from __future__ import annotations

import importlib
import io
from typing import Any

import pytest
from rich.console import Console

pytestmark = pytest.mark.cuda


@pytest.fixture
def demo(monkeypatch) -> Any:
    for package in ("safetensors", "tokenizers"):
        pytest.importorskip(package, reason=f"graphrt.demo imports {package}")
    monkeypatch.delenv("GRAPHRT_PLATFORM", raising=False)
    run_demo = importlib.import_module("graphrt.demo").run_demo

    def run(**options: Any) -> tuple[int, str]:
        text = io.StringIO()
        code = run_demo(console=Console(file=text, width=120), max_new_tokens=12, **options)
        return code, text.getvalue()

    return run


def modes_of(text):
    """The modes in the table of steps: of decode steps, of mixed ones."""
    cells = [[cell.strip() for cell in line.split("│")] for line in text.splitlines()]
    rows = [(row[1], int(row[5])) for row in cells if len(row) == 10 and row[5].isdigit()]
    return {mode for mode, mixed in rows if not mixed}, {mode for mode, mixed in rows if mixed}


@pytest.mark.parametrize(
    ("mode", "decode", "mixed"),
    [
        (None, "FULL", "PIECEWISE"),
        ("FULL", "FULL", "FULL"),
        ("PIECEWISE", "PIECEWISE", "PIECEWISE"),
        ("FULL_DECODE_ONLY", "FULL", "NONE"),
    ],
)
def test_the_demo_chooses_the_gpu_and_every_mode_equals_padded_eager(demo, mode, decode, mixed):
    code, text = demo(mode=mode)
    assert code == 0, text
    assert " on cuda" in text.splitlines()[0]
    assert " 0 differ (torch.equal)" in text and text.rstrip().endswith(": equal")
    assert modes_of(text) == ({decode}, {mixed})


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_demo_with_a_bfloat16_checkpoint_equals_padded_eager(demo, tmp_path, name):
    checkpoints = importlib.import_module("tests.demo.tiny_checkpoints")
    checkpoints.write(tmp_path, checkpoints.CONFIGS[name])
    code, text = demo(model=tmp_path, sizes=[4, 16, 64])
    assert code == 0, text
    assert " 0 differ (torch.equal)" in text and text.rstrip().endswith(": equal")
