"""An engine's process, seen by the parent: started, asked, watched until nothing of it is left."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.vllm_host.processes import ROOT


class EngineFailed(RuntimeError):
    """An engine has ended, or did not reply in time."""


class Handle:
    """The process of one engine, and all that it started: they are one session of the system."""

    def __init__(
        self, name: str, options: dict[str, Any], work: Path, environment: dict[str, str]
    ) -> None:
        self.name = name
        self.log = work / f"{name}.log"
        file = work / f"{name}.options.json"
        file.write_text(json.dumps(options))
        reader, writer = os.pipe()
        command = [sys.executable, "-m", "benchmarks.gpu.vllm_host.ranks.engine"]
        with open(self.log, "wb") as out:
            self.process = subprocess.Popen(
                [*command, str(file), str(writer)],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=(writer,),
                start_new_session=True,
                text=True,
            )
        os.close(writer)
        self._begun: Any = None
        self._replies: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, args=(reader,), daemon=True).start()

    def _read(self, reader: int) -> None:
        with os.fdopen(reader) as lines:
            for line in lines:
                self._replies.put(line)
        self._replies.put(None)

    def send(self, **request: Any) -> None:
        """Ask for something, whose reply `reply` gives."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise EngineFailed(f"{self.name}: its input is closed: {error}") from error

    def reply(self, seconds: float) -> Any:
        try:
            line = self._replies.get(timeout=max(0.0, seconds))
        except queue.Empty:
            raise EngineFailed(f"{self.name}: no reply in {seconds:.0f} s") from None
        if line is None:
            raise EngineFailed(f"{self.name}: ended ({self.process.poll()})")
        found = json.loads(line)
        if "error" in found:
            raise EngineFailed(f"{self.name}: {found['error']}")
        return found["reply"]

    def started(self, seconds: float) -> Any:
        """What it replies once it has started."""
        if self._begun is None:
            self._begun = self.reply(seconds)
        return self._begun

    def ask(self, seconds: float, **request: Any) -> Any:
        self.send(**request)
        return self.reply(seconds)

    def left(self) -> dict[int, str]:
        """The processes of its session that are alive, by id, with their commands."""
        self.process.poll()  # so that it is no zombie
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue  # it has ended meanwhile
            if int(fields[3]) == self.process.pid and fields[0] not in "ZX":
                found[int(entry.name)] = command.strip()[:120]
        return found

    def workers(self) -> dict[int, str]:
        """Those of `left` that vLLM started: not the first process, nor Python's own helper of it,
        which ends with it."""
        return {
            pid: command
            for pid, command in self.left().items()
            if pid != self.process.pid and "resource_tracker" not in command
        }

    def pause(self) -> None:
        """Stop all of its processes where they are: workers of vLLM's spin for a second after each
        step, and share cores with those of the engine that is timed."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def pin(self, cores: dict[str, set[int]]) -> None:
        """Run each process on the cores of its role, which is the end of its name; "" is all others
        than workers."""
        for pid, command in self.left().items():
            role = next((role for role in cores if role and command.endswith(role)), "")
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    os.sched_setaffinity(int(thread.name), cores[role])

    def _signal(self, number: int) -> None:
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(pid, number)

    def stop(self) -> None:
        """End all of its processes."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended
                self.process.stdin.close()
        self._signal(signal.SIGKILL)
        until = time.time() + 5
        while self.left() and time.time() < until:
            time.sleep(0.05)

    def lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
