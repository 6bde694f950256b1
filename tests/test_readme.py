"""The examples of the documents run as they stand."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent


def examples(document: str) -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_the_fifteen_lines_run_as_they_stand(capsys):
    code = examples("README.md")[0]
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 15
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == "torch.Size([3, 256]) HIT\n"


def test_the_compiled_model_runs_as_it_stands(capsys, tmp_path):
    (code,) = examples("docs/compile.md")
    script = tmp_path / "walk.py"
    script.write_text(code)
    runpy.run_path(str(script))
    assert capsys.readouterr().out == "5 3\n"
