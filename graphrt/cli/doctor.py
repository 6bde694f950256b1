"""`graphrt doctor`: what is installed, what is available, and why not."""

from __future__ import annotations

import json
import platform as host
from importlib import metadata
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import graphrt
from graphrt.core.base._native_door import native_state
from graphrt.core.base.errors import GraphRTError
from graphrt.core.device._allowed import BLOCK_VARIABLE, ONLY_VARIABLE, AllowedPlugins
from graphrt.core.device.registry import (
    ENTRY_POINT_GROUP,
    FoundPlatform,
    current_platform,
    installed_platforms,
)

PACKAGES = ("torch", "pluggy", "triton", "torch_npu", "cuda-bindings", "safetensors", "tokenizers")


def print_doctor(*, as_json: bool, console: Console | None = None) -> int:
    """Print the diagnosis; the exit code is 1 if no platform can be used."""
    report = diagnose()
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _show(report, console or Console())
    return 0 if report["current"]["platform"] else 1


def diagnose() -> dict[str, Any]:
    """Everything the command shows, as plain data."""
    return {
        "graphrt": graphrt.__version__,
        "python": host.python_version(),
        "machine": f"{host.system()} {host.machine()}",
        "native": native_state,
        "host_changes": _host_changes(),
        "versions": {name: _version(name) for name in PACKAGES},
        "platforms": [_platform(platform) for platform in installed_platforms()],
        "notes": _notes(),
        "current": _current(),
    }


def _host_changes() -> str:
    from graphrt.core.trust.host_watch import watch_state

    why_not = watch_state()
    return f"seen some steps later: {why_not}" if why_not else "seen at the next step"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _platform(entry: FoundPlatform) -> dict[str, Any]:
    platform = entry.platform
    # Asked first: what cannot be asked is not available, and says why.
    versions = _asked(entry, "versions") if platform and entry.availability.available else {}
    wrapper = _asked(entry, "get_static_graph_wrapper_cls") if platform else None
    return {
        "name": entry.name,
        "plugin": entry.plugin,
        "available": entry.availability.available,
        "reason": entry.availability.reason,
        "error": entry.error,
        "blocked": entry.blocked,
        "capabilities": sorted(c.value for c in platform.capabilities) if platform else [],
        "wrapper": wrapper,
        "versions": versions,
    }


def _asked(entry: FoundPlatform, method: str) -> Any:
    try:
        return getattr(entry.platform, method)()
    except Exception as error:
        entry.failed(f"failed {method}()", error)
        return None


def _notes() -> list[str]:
    installed = metadata.entry_points(group=ENTRY_POINT_GROUP)
    notes = [
        f"{BLOCK_VARIABLE} or {ONLY_VARIABLE} names {name!r}, which no installed plugin is called"
        for name in AllowedPlugins.from_environment().missing(installed)
    ]
    if _version("torch_npu") is not None:
        from graphrt.ascend.driver.library import environment_notes

        notes += environment_notes()
    return notes


def _current() -> dict[str, Any]:
    try:
        return {"platform": current_platform().name, "error": None}
    except GraphRTError as error:
        return {"platform": None, "error": str(error)}


def _show(report: dict[str, Any], console: Console) -> None:
    console.print(f"graphrt {report['graphrt']}, Python {report['python']}, {report['machine']}")
    console.print(Text(f"The step in C: {report['native']}"))
    console.print(Text(f"What a host changes in Python: {report['host_changes']}"))
    versions = Table(title="Libraries", title_justify="left")
    versions.add_column("package")
    versions.add_column("version")
    for name, version in report["versions"].items():
        versions.add_row(name, version or Text("not installed", style="dim"))
    console.print(versions)
    table = Table(title="Platforms", title_justify="left")
    for column in ("platform", "plugin", "available", "capabilities"):
        table.add_column(column, overflow="fold")
    for entry in report["platforms"]:
        yes = entry["available"]
        state = (
            Text("yes", style="green") if yes else Text(f"no: {entry['reason']}", style="yellow")
        )
        table.add_row(
            entry["name"] or "?", entry["plugin"], state, ", ".join(entry["capabilities"])
        )
    console.print(table)
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
