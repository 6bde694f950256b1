"""Starts the ranks of a test as processes, and reads what they saw."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tests.ranks import worker

PATIENCE = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1) / 4)
"""How many times slower than alone this machine may be."""

TIMEOUT_S = 3.0 * PATIENCE
"""After which a rank of a test is lost."""

# Ranks are forked from a process that has imported torch, and has no threads.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "graphrt", "tests.ranks.worker"])


def launch(
    case: dict[str, Any], ranks: int, *, lost: Collection[int] = (), limit_s: float = 120.0
) -> dict[int, dict[str, Any]]:
    """Run `worker.py` on so many ranks; what each has written, by rank. Those that are `lost` are
    killed once the others have ended, and may have written nothing."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(ranks):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            process = _CONTEXT.Process(target=worker.run, args=(case, folder, rank, environment))
            process.start()
            started.append(process)
        ended = time.monotonic() + limit_s * PATIENCE
        hang = []
        try:
            for rank, process in enumerate(started):
                if rank not in lost:
                    process.join(max(ended - time.monotonic(), 0.1))
                    hang += [rank] if process.is_alive() else []
        finally:
            for process in started:
                process.kill()
                process.join()
        seen = {}
        for rank in range(ranks):
            path = Path(folder, f"{rank}.json")
            seen[rank] = json.loads(path.read_text()) if path.exists() else {"nothing": True}
    assert not hang, f"ranks {hang} hang; the others: {seen}"
    for rank, each in seen.items():
        assert "raw" not in each, each["raw"]
        assert rank in lost or "nothing" not in each, rank
    return seen
