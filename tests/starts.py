"""Starts of Python for tests, without two seconds of CPU each for `import torch`.

`run` is `subprocess.run([sys.executable, *arguments], ...)` in a process that has imported torch
and nothing of graphrt. One such process waits beside each pytest; a start is its fork, which gets
the variables, the directory and the arguments that were asked for, and runs the code as `__main__`.
It leaves without taking the interpreter apart, which takes half a second, unless `finalized`.

Not for: options of Python itself, the import of torch, variables that Python or torch read as they
start, and code that reads its standard input.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def run(
    *arguments: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    timeout: float = 300,
    check: bool = False,
    finalized: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Start Python with `-c CODE`, `-m MODULE` or a file, and arguments after it; wait for it."""
    variables = dict(os.environ if env is None else env)
    for name, text in variables.items():
        if name.startswith("PYTHON") and name != "PYTHONPATH" and os.environ.get(name) != text:
            raise ValueError(f"{name} is read as Python starts: use subprocess")
    with tempfile.TemporaryDirectory() as folder:
        told = [str(Path(folder, name)) for name in ("stdout", "stderr")]
        request = [timeout, finalized, arguments, variables, str(cwd or Path.cwd()), told]
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        print(json.dumps(request), file=server.stdin, flush=True)
        code = json.loads(server.stdout.readline())
        out, err = (Path(name).read_text(encoding="utf-8") for name in told)
    if code is None:
        raise subprocess.TimeoutExpired(arguments, timeout, out, err)
    done = subprocess.CompletedProcess(arguments, code, out, err)
    if check and code:
        raise AssertionError(f"{arguments} ended with {code}:\n{err}")
    return done


@functools.cache
def _server() -> subprocess.Popen[str]:
    variables = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    server = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Who starts Python beside a broken torch_npu says so; `_start` has no second import.
        env=variables | {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    assert server.stdin is not None
    server.stdin.close()
    server.wait(60)


def _serve() -> list[Any] | None:
    """In the server: forks for each request until there are no more. In a fork: its request."""
    import torch  # noqa: F401

    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        pid = os.fork()
        if not pid:
            return request
        print(json.dumps(_waited_for(pid, request[0])), flush=True)
    return None


def _waited_for(pid: int, timeout: float) -> int | None:
    """The exit code of a fork; None if it was killed because the time is over."""
    ends = time.monotonic() + timeout
    while time.monotonic() < ends:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return None


def _start(arguments: Sequence[str], env: dict[str, str], cwd: str, told: Sequence[str]) -> None:
    """Be the process that was asked for."""
    for descriptor, name in enumerate((os.devnull, *told)):
        opened = os.open(name, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    what, *rest = arguments
    name = rest.pop(0) if what in ("-c", "-m") else what
    first = {"-c": "", "-m": cwd}.get(what, str(Path(name).parent))
    added = [each for each in env.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:1] = [first, *added]
    sys.argv = [what if what == "-c" else name, *rest]
    importlib.invalidate_caches()
    if what == "-m":
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif what != "-c":
        runpy.run_path(name, run_name="__main__")
    else:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(name, "<string>", "exec"), vars(main))


def _left(run: Callable[[], None]) -> int:
    """The exit code that Python would have, after all but the end of the interpreter."""
    code: object = 0
    try:
        run()
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code or 0


if __name__ == "__main__" and (asked := _serve()) is not None:
    _, finalized, *given = asked
    if finalized:
        _start(*given)
    else:
        os._exit(_left(lambda: _start(*given)))
