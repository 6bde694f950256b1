"""`refused.json`: which operators are refused and why, and which eager code itself repeats not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.operators.samples import cases
from tests.operators.table import Row
from tests.operators.trial import AT_STEP, RANDOM, REFUSED

FILE = Path(__file__).parent / "refused.json"
_NAMED = (REFUSED, AT_STEP)


def lines_of(rows: Iterable[Row]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What is refused, and what is not deterministic: one entry for each operator, way of calling
    and reason, with the samples of each dtype that it is true of."""
    refused: dict[tuple[str, ...], dict[str, str]] = {}
    random: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        counts: Counter[tuple[str, ...]] = Counter()
        for v in row.verdicts:
            if v.outcome in _NAMED:
                counts[v.error, v.operator, v.why] += 1
        for reason, count in counts.items():
            samples = refused.setdefault((row.name, row.variant, *reason), {})
            samples[row.dtype] = f"{count} of {len(row.verdicts)}"
        unsteady = sum(v.outcome == RANDOM or v.random for v in row.verdicts)
        if unsteady:
            samples = random.setdefault((row.name, row.variant), {})
            samples[row.dtype] = f"{unsteady} of {len(row.verdicts)}"
    keys = ("operator", "called", "error", "refused", "why")
    return (
        [dict(zip(keys, key, strict=True)) | {"samples": s} for key, s in sorted(refused.items())],
        [dict(zip(keys, key, strict=False)) | {"samples": s} for key, s in sorted(random.items())],
    )


def write(rows: Sequence[Row], device: str) -> None:
    """Make the file anew, one entry a line; `rows` are of the first operators of each dtype, as
    `cases` orders them, and the file says of how many."""
    refused, random = lines_of(rows)
    parts = {"refused": refused, "not deterministic in eager code": random}
    names = {row.dtype: {r.name for r in rows if r.dtype == row.dtype} for row in rows}
    tried = {dtype: len(samples) for dtype, samples in names.items()}
    head = {"torch": version(), "device": device, "operators tried": tried}
    text = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in head.items())
    for name, entries in parts.items():
        body = ",\n".join("  " + json.dumps(entry) for entry in entries)
        text += f",\n{json.dumps(name)}: [\n{body}\n]"
    FILE.write_text("{\n" + text + "\n}\n", encoding="utf-8")


def version() -> str:
    """torch's, without the build."""
    return torch.__version__.split("+")[0]


def listed() -> dict[str, Any]:
    """What the file says."""
    listing: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return listing


def lacking(rows: Iterable[Row], device: str) -> list[str]:
    """What is refused, or for more samples, and is not in the file; nothing for another torch,
    device or operator than those that were tried for the file."""
    known = listed() if FILE.exists() else {}
    if (known.get("torch"), known.get("device")) != (version(), device):
        return []
    tried = {
        (case.name, dtype)
        for dtype, count in known["operators tried"].items()
        for case in cases(device, (getattr(torch, dtype),))[:count]
    }
    rows = [row for row in rows if (row.name, row.dtype) in tried]
    before = {_key(entry): entry["samples"] for entry in known["refused"]}
    lines = []
    for entry in lines_of(rows)[0]:
        samples = before.get(_key(entry), {})
        for dtype, count in entry["samples"].items():
            if _number(count) > _number(samples.get(dtype, "0 of 0")):
                line = f"{entry['operator']} {entry['called']} {dtype}: {count}, {entry['error']}"
                lines.append(f"{line} {entry['refused']}: {entry['why']}")
    return lines


def _key(entry: dict[str, Any]) -> tuple[str, ...]:
    return entry["operator"], entry["called"], entry["error"], entry["refused"]


def _number(count: str) -> int:
    return int(count.split()[0])
