"""The table of `edits.py`: what the second start finds, and whether its results are right."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compile.edits import AROUND, EDITS, FOUND, HIT, MISS, PROGRAMS, Edit

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
COMPILERS = [
    "stand-in",
    pytest.param(
        "inductor",
        marks=[
            pytest.mark.long,
            pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++"),
        ],
    ),
]


class Starts:
    """Programs on disk, each with the cache of its first start."""

    def __init__(self, root: Path, compiler: str) -> None:
        self.root, self.compiler = root, compiler
        self._first: dict[str, dict[str, Any]] = {}
        self._server = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("edits_start.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "TRITON_INTERPRET": "0",
                "TORCHINDUCTOR_CACHE_DIR": str(root / "inductor"),
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
            },
        )

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(60)

    def run(self, *several: dict[str, Any]) -> list[dict[str, Any]]:
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps(several), file=self._server.stdin, flush=True)
        found: list[dict[str, Any]] = json.loads(self._server.stdout.readline())
        for each in found:
            assert "error" not in each, each["error"]
        return found

    def given(self, program: str, directory: Path, cache: Path, **more: Any) -> dict[str, Any]:
        return {
            "directory": str(directory),
            "cache": str(cache),
            "compiler": self.compiler,
            "environment": {},
            "options": {},
            "setup": "",
            "setup_after": "",
            "around": AROUND.get(program, ""),
            **more,
        }

    def written(self, program: str) -> Path:
        directory = self.root / program / "source"
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in PROGRAMS[program].items():
            (directory / name).write_text(text)
        return directory

    def first(self, program: str) -> tuple[Path, Path]:
        """The sources of a program, and a copy of the cache of its first start."""
        directory, kept = self.written(program), self.root / program / "kept"
        if program not in self._first:
            (found,) = self.run(self.given(program, directory, kept))
            self._first[program] = found
            assert found["right"] and found["compiled"] and not found["loaded"], found
        cache = self.root / program / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        if kept.exists():
            shutil.copytree(kept, cache)
        return directory, cache

    def second(self, edit: Edit) -> dict[str, Any]:
        """The start after an edit."""
        directory, cache = self.first(edit.program)
        if edit.moved:
            there = self.root / "moved" / edit.program
            shutil.rmtree(there, ignore_errors=True)
            directory = Path(shutil.move(directory, there))
        for name, (old, new) in edit.files.items():
            text = (directory / name).read_text()
            assert old in text, edit
            (directory / name).write_text(text.replace(old, new) if old else new)
        more: dict[str, Any] = {"around": edit.around} if edit.around else {}
        (found,) = self.run(
            self.given(
                edit.program,
                directory,
                cache,
                setup=edit.setup,
                setup_after=edit.setup_after,
                options=dict(edit.options),
                environment=dict(edit.environment),
                **more,
            )
        )
        return found


def outcome(found: dict[str, Any]) -> str:
    if "refused" in found:
        return "refused"
    if found["compiled"] and found["loaded"]:
        return "part"
    return MISS if found["compiled"] else HIT


@pytest.fixture(scope="module", params=COMPILERS)
def starts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Starts]:
    made = Starts(tmp_path_factory.mktemp("edits"), request.param)
    yield made
    made.close()


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.name)
def test_the_second_start_after(starts: Starts, edit: Edit):
    if edit.name in FOUND:
        pytest.xfail(FOUND[edit.name])
    found = starts.second(edit)
    assert (outcome(found), found.get("right")) == (edit.must, True), found
