"""`graphrt doctor`: what is installed, what is available, whether it works, and why not.

On each platform that is available a small graph is captured and replayed, and its output compared
with the forward's. Variables `GRAPHRT_*` that graphrt does not read are named.
"""

from __future__ import annotations

import json
import os
import platform as host
import re
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import graphrt
from graphrt.cli.variables import variables_set
from graphrt.core.base._native_door import native_state
from graphrt.core.base.errors import GraphRTError
from graphrt.core.base.texts import error_line, printable_data, seconds_text
from graphrt.core.device.registry import (
    FoundPlatform,
    current_platform,
    installed_platforms,
)

PACKAGES = ("torch", "pluggy", "triton", "torch_npu", "safetensors", "tokenizers")
_NVIDIA = Path("/proc/driver/nvidia/version")
_ROWS, _SIZE, _STEPS = 3, 4, 20


def print_doctor(*, as_json: bool, tries: bool = True, console: Console | None = None) -> int:
    """Print the diagnosis; the exit code is 1 if no platform can be used, or one that is tried does
    not work."""
    # With graphs turned off there is nothing to try.
    is_off = os.environ.get("GRAPHRT_MODE", "").upper() == "NONE"
    report = diagnose(tries=tries and not is_off)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        # Names and errors are a plugin's: a terminal must not obey them.
        _show(printable_data(report), console or Console())
    broken = any(each["tried"] and each["tried"]["error"] for each in report["platforms"])
    return 1 if broken or not report["current"]["platform"] else 0


def diagnose(*, tries: bool = True) -> dict[str, Any]:
    """Everything the command shows, as plain data. With `tries` a graph is captured and replayed on
    each platform that is available."""
    return {
        "graphrt": graphrt.__version__,
        "python": host.python_version(),
        "machine": f"{host.system()} {host.machine()}",
        "native": native_state,
        "host_changes": _host_changes(),
        "versions": {name: _version(name) for name in PACKAGES},
        "platforms": [_platform(platform, tries=tries) for platform in installed_platforms()],
        "environment": variables_set(os.environ),
        "notes": _notes(),
        "current": _current(),
    }


def _host_changes() -> str:
    from graphrt.trust.host_watch import watch_state

    why_not = watch_state()
    return f"seen some steps later: {why_not}" if why_not else "seen at the next step"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _platform(entry: FoundPlatform, *, tries: bool) -> dict[str, Any]:
    platform = entry.platform
    # First: a platform whose methods raise is marked unavailable by this, with the reason.
    versions = _asked(entry, "versions") if platform and entry.availability.available else {}
    wrapper = _asked(entry, "get_static_graph_wrapper_cls") if platform else None
    devices = _devices(entry) if platform and entry.availability.available else []
    return {
        "name": entry.name,
        "plugin": entry.plugin,
        "file": entry.file,
        "available": entry.availability.available,
        "reason": entry.availability.reason,
        "error": entry.error,
        "capabilities": sorted(c.value for c in platform.capabilities) if platform else [],
        "wrapper": wrapper,
        "versions": versions,
        "devices": devices,
        "driver": _driver() if entry.name == "cuda" else None,
        "tried": _tried(str(entry.name)) if tries and entry.availability.available else None,
    }


def _devices(entry: FoundPlatform) -> list[str]:
    """The names of a platform's devices, where torch knows them."""
    kind = getattr(entry.platform, "device_type", "cpu")
    # torch.get_device_module raises for a device that torch has no module of.
    name_of = getattr(getattr(torch, kind, None), "get_device_name", None)
    if kind == "cpu" or name_of is None:
        return [host.processor() or host.machine()] if kind == "cpu" else []
    count = int(_asked(entry, "device_count") or 0)
    try:
        return [str(name_of(index)) for index in range(count)]
    except Exception as error:
        entry.failed("could not name its devices", error)
        return []


def _driver() -> str | None:
    """The version of NVIDIA's kernel module."""
    try:
        match = re.search(r"Kernel Module\S*\s+(?:for \S+\s+)?([\d.]+)", _NVIDIA.read_text())
    except OSError:
        return None
    return match[1] if match else None


def _tried(name: str) -> dict[str, Any]:
    """Capture a small graph on a platform and replay it; the seconds of the capture and of a step,
    or the error."""
    try:
        with graphrt.GraphRunner(
            lambda x: (x * 2 + 1).sum(-1, keepdim=True),
            mode="FULL",
            sizes=[_SIZE],
            inputs={"x": graphrt.InputSpec(torch.float32, ("tokens", 8))},
            outputs=("tokens", 1),
            platform=name,
        ) as runner:
            runner.capture()
            x = torch.arange(_ROWS * 8, dtype=torch.float32, device="cpu").reshape(_ROWS, 8)
            # The first step is a trial, so it is not timed; the last one's output is compared.
            began = 0.0
            for step in range(_STEPS + 1):
                out = runner(x=x)
                began = perf_counter() if not step else began
            runner.platform.synchronize()
            step_s = (perf_counter() - began) / _STEPS
            reason, capture_s = runner.last_dispatch, runner.report().capture_s
            right = torch.equal(out.cpu(), (x * 2 + 1).sum(-1, keepdim=True))
    except Exception as error:
        # Whatever is broken there: the diagnosis of everything else is still wanted.
        return {"error": error_line(error)}
    why = None if reason is None else reason.reason
    if why is not graphrt.Reason.HIT:
        return {"error": f"no graph served the step: {why}"}
    error_text = None if right else "the replay gave other values than the forward"
    return {"error": error_text, "capture_s": capture_s, "step_s": step_s}


def _asked(entry: FoundPlatform, method: str) -> Any:
    try:
        return getattr(entry.platform, method)()
    except Exception as error:
        entry.failed(f"failed {method}()", error)
        return None


def _notes() -> list[str]:
    if _version("torch_npu") is None:
        return []
    from graphrt.ascend.driver.library import environment_notes

    return [*environment_notes()]


def _current() -> dict[str, Any]:
    try:
        return {"platform": current_platform().name, "error": None}
    except GraphRTError as error:
        return {"platform": None, "error": str(error)}


def _tried_text(name: str, tried: dict[str, Any]) -> Text:
    if tried["error"]:
        return Text(f"{name} does not work: {tried['error']}", style="bold red")
    capture, step = seconds_text(tried["capture_s"]), seconds_text(tried["step_s"])
    text = f"{name} works: a small graph was captured in {capture}, its step takes {step}"
    return Text(text, style="green")


def _show_variable(variable: dict[str, Any], console: Console) -> None:
    text = f"{variable['name']}={variable['value']}"
    if variable["meaning"]:
        console.print(Text(f"{text}: {variable['meaning']}"))
        return
    nearest = f"; is {variable['nearest']} meant?" if variable["nearest"] else ""
    console.print(Text(f"{text}: graphrt reads no such variable{nearest}", style="bold yellow"))


def _show(report: dict[str, Any], console: Console) -> None:
    console.print(f"graphrt {report['graphrt']}, Python {report['python']}, {report['machine']}")
    console.print(Text(f"The step in C: {report['native']}"))
    console.print(Text(f"A Python value changed after a capture is {report['host_changes']}"))
    versions = Table(title="Libraries", title_justify="left")
    versions.add_column("package")
    versions.add_column("version")
    for name, version in report["versions"].items():
        versions.add_row(name, Text(version) if version else Text("not installed", style="dim"))
    console.print(versions)
    table = Table(title="Platforms", title_justify="left")
    for column in ("platform", "plugin", "available", "devices"):
        table.add_column(column, overflow="fold")
    for entry in report["platforms"]:
        is_available = entry["available"]
        state = (
            Text("yes", style="green")
            if is_available
            else Text(f"no: {entry['reason']}", style="yellow")
        )
        driver = f", driver {entry['driver']}" if entry["driver"] else ""
        devices = f"{', '.join(dict.fromkeys(entry['devices']))}{driver}"
        table.add_row(Text(entry["name"] or "?"), Text(entry["plugin"]), state, Text(devices))
    console.print(table)
    files = {entry["plugin"]: entry["file"] for entry in report["platforms"] if entry["file"]}
    for plugin, file in files.items():
        console.print(Text(f"Plugin {plugin} is {file}"))
    for entry in report["platforms"]:
        if entry["tried"] is not None:
            console.print(_tried_text(entry["name"], entry["tried"]))
    for each in report["environment"]:
        _show_variable(each, console)
    for entry in report["platforms"]:
        if entry["error"]:
            console.print(Text(f"Plugin {entry['plugin']} failed:", style="bold red"))
            console.print(Text(entry["error"].rstrip(), style="dim"))
    for note in report["notes"]:
        console.print(Text(f"Note: {note}", style="yellow"))
    current = report["current"]
    if current["platform"]:
        console.print(Text.assemble("Current platform: ", (current["platform"], "bold green")))
    else:
        console.print(Text(f"No current platform: {current['error']}", style="bold red"))
