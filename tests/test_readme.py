"""The README's integration runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_fifteen_lines_run_as_they_stand(capsys):
    code = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[0]
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 15
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == "torch.Size([3, 256]) HIT\n"
