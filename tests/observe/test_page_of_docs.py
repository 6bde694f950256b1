"""docs/how-to/observing.md runs as it stands, and shows what is printed."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "how-to" / "observing.md"


def without_times(text: str) -> str:
    """Times, sizes of pools and the blanks beside them are a machine's own, and how changes in
    Python are seen is Python's."""
    text = re.sub(r" *A Python value changed .*\n", "", text)
    return re.sub(r" +", " ", re.sub(r"[\d.]+ (ms|us|s|KiB|B)\b", "TIME", text))


def test_the_code_of_the_observing_page_runs_and_prints_as_documented(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRAPHRT_PLATFORM", "cpu")
    text = DOCUMENT.read_text(encoding="utf-8")
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(code, str(DOCUMENT), "exec"), names)
        printed = textwrap.indent(capsys.readouterr().out, "    ", lambda line: bool(line.strip()))
        assert without_times(printed) in without_times(text)
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {"run.json", "run.html", "trace.json", "profile.json"}
