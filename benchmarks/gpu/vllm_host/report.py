"""The table of `run`, what is told of each configuration, and which one passed."""

from typing import Any

from benchmarks.gpu.vllm_host.configurations import TIMED, configurations


def passed(result: dict[str, Any], name: str) -> bool:
    if "error" in result or result.get("stage") != "done":
        return False
    if not all(batch["equal"] for batch in result["batches"].values()):
        return False
    if not result["equal_after"]:
        return False
    captured = result["graphrt"]["own_captures"]
    replayed = all(batch["graphrt_steps"] for batch in result["batches"].values())
    return not captured if configurations()[name].get("off") else bool(captured and replayed)


def table(results: dict[str, Any]) -> str:
    head = [
        "configuration",
        "mode",
        "ok",
        "equal at",
        "captures g|v",
        "capture s g|v",
        "reserved MiB g|v",
    ]
    head += [f"step us B={batch} g|v (ratio)" for batch in TIMED] + ["replays|steps B=64", "eager"]
    rows = [head, ["---"] * len(head)]
    for name, result in results.items():
        mine, theirs = result.get("graphrt", {}), result.get("vllm", {})
        batches = result.get("batches", {})
        equal = ",".join(
            str(batch) if got["equal"] else f"{batch}:{got['share_equal']}"
            for batch, got in batches.items()
        )
        row = [name, mine.get("resolved", "-").split(".")[-1], str(passed(result, name)), equal]
        row.append(f"{mine.get('graphs')}|{theirs.get('graphs')} (own {mine.get('own_captures')})")
        again = result.get("recaptured", {})
        best = [min((c["seconds"] for c in again[each]), default=None) for each in again]
        row.append("|".join(map(str, best)) or "-")
        row.append(f"{mine.get('reserved_mib')}|{theirs.get('reserved_mib')}")
        for batch in TIMED:
            got = result.get("timed", {}).get(str(batch))
            row.append(f"{got['graphrt']}|{got['vllm']} ({got['ratio']})" if got else "-")
        last = batches.get("64", {})
        row.append(f"{last.get('replays')}|{last.get('graphrt_steps')}")
        row.append(str(sum(result.get("eager", {}).values())))
        rows.append(row)
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def tell(name: str, result: dict[str, Any], log: list[str]) -> None:
    """What the log says of graphrt, and, of what failed, its end."""
    print(f"\n== {name}: {result.get('stage')}")
    for key in ("graphrt", "vllm", "eager", "equal_after"):
        print(f"   {key}: {result.get(key)}")
    for engine, captures in result.get("recaptured", {}).items():
        told = ", ".join(
            f"{c['graphs']} in {c['seconds']} s, {c['mib']} MiB, {c['reserved_mib']} reserved"
            for c in captures
        )
        print(f"   {engine} captured again: {told}")
    for line in [line for line in log if "graphrt" in line and "Traceback" not in line][:14]:
        print(f"   | {line[:260]}")
    if not passed(result, name):
        for line in (result.get("error", "").splitlines() or log)[-60:]:
            print(f"   ! {line[:400]}")
        for line in [line for line in log if "rror" in line][-12:]:
            print(f"   ? {line[:400]}")
