"""graphrt serves nothing and calls nobody: no module of it can open a socket."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import starts

ROOT = Path(__file__).parents[1]
NETWORK = {
    "aiohttp",
    "asyncio",
    "fastapi",
    "flask",
    "ftplib",
    "grpc",
    "http",
    "httpx",
    "huggingface_hub",
    "prometheus_client",
    "requests",
    "smtplib",
    "socket",
    "socketserver",
    "urllib",
    "urllib3",
    "uvicorn",
    "websockets",
    "wsgiref",
    "xmlrpc",
    "zmq",
}
ALLOWED = {
    # It writes the text of a scrape, and serves nothing: a host does.
    "examples/prometheus.py": {"prometheus_client"},
    # It counts trials among the metrics of vLLM, which serves them.
    "graphrt/hosts/vllm/trials.py": {"prometheus_client"},
    # Tasks of one process wait for tokens: no socket.
    "examples/engine/streams.py": {"asyncio"},
}
"""What of `NETWORK` a file imports all the same."""
EVERYWHERE = ("0.0.0.0", "tcp://")


def sources() -> list[Path]:
    places = ("graphrt", "packages/graphrt-ascend-sim/src", "examples", "benchmarks")
    return sorted(each for place in places for each in (ROOT / place).rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("path", sources(), ids=lambda each: str(each.relative_to(ROOT)))
def test_no_module_imports_network_libraries_or_binds_to_all_addresses(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    allowed = ALLOWED.get(path.relative_to(ROOT).as_posix(), set())
    assert not NETWORK & set(imported(tree)) - allowed
    texts = [each.value for each in ast.walk(tree) if isinstance(each, ast.Constant)]
    assert not [text for text in texts if isinstance(text, str) and text.startswith(EVERYWHERE)]


WATCHED = """
import sys
seen = []
sys.addaudithook(lambda name, args: seen.append(name) if name.startswith("socket.") else None)
import torch, graphrt
from graphrt.platforms import installed_platforms
installed_platforms()
runner = graphrt.GraphRunner(
    lambda x: x + 1, mode="FULL_AND_PIECEWISE", sizes=[1, 4], platform="cpu",
    inputs={"x": graphrt.InputSpec(torch.float32, ("tokens", 2))}, outputs=("tokens", 2),
)
runner.capture()
runner(x=torch.ones(3, 2))
runner.report()
DEMO
print("sockets:", seen)
"""


@pytest.mark.parametrize("demo", [False, True])
def test_capture_replay_report_and_demo_open_no_socket(demo):
    call = ""
    if demo:
        pytest.importorskip("rich")
        pytest.importorskip("safetensors")
        pytest.importorskip("tokenizers")
        call = "from graphrt.demo import run_demo; run_demo(platform='cpu', max_new_tokens=2)"
    code = WATCHED.replace("DEMO", call)
    done = starts.run("-c", code, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert "sockets: []" in done.stdout
