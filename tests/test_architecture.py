"""docs/development/architecture.md has the map and the walks of this tree, the site the surface.

A walk of the page is a part of the trace that benchmarks.walk takes, in the trace's order.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.walk import Call, Model, capture_walk, step_walk
from graphrt.core.base._native_door import NativePath
from graphrt.core.runner import engine
from tests.test_layout import LAYERS, UPPER
from tests.test_surface import PUBLIC, SURFACE

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "development" / "architecture.md").read_text(encoding="utf-8")
MAP, STEP, CONTRACT, CAPTURE = re.findall(r"```\n(.*?)```", PAGE, re.DOTALL)
# The lines of a walk that C does in one call, where it is built.
IN_C = ["StepEngine.step", "GraphDispatcher.dispatch", "StepEngine.is_clear"]
# The lines that the forward of benchmarks.walk does not need on the CPU.
NOT_ON_CPU = ["Constants.run"]


def walk_of(block: str) -> list[Call]:
    """The calls that a walk of the page lists, in order."""
    return [Call(*line) for line in re.findall(r"^(\S+\.py) +([\w.]+)", block, re.MULTILINE)]


def without(walk: list[Call], names: list[str]) -> list[Call]:
    kept = [call for call in walk if call.function not in names]
    assert len(kept) == len(walk) - len(names), f"the page has not each of {names} once"
    return kept


def is_call_of(traced: Call, listed: Call) -> bool:
    """If it is that function, one inside of it, or a method of that class."""
    return traced.file == listed.file and f"{traced.function}.".startswith(f"{listed.function}.")


def not_in_order(walk: list[Call], trace: list[Call]) -> list[Call]:
    """The listed calls that the trace lacks behind the one listed before."""
    missing, start = [], 0
    for listed in walk:
        behind = (n for n in range(start, len(trace)) if is_call_of(trace[n], listed))
        at = next(behind, None)
        if at is None:
            missing.append(listed)
        else:
            start = at + 1
    return missing


@pytest.fixture(scope="module")
def model():
    return Model()


def folders(tree: str) -> list[str]:
    """The folders of a map that is indented by two spaces, as paths."""
    paths, around = [], []
    for line in tree.splitlines():
        name = re.match(r"( *)(\w+)/ +\S", line)
        assert name, line
        del around[len(name[1]) // 2 :]
        around.append(name[2])
        paths.append("/".join(around))
    return paths


def test_the_architecture_map_lists_every_folder_once():
    real = {str(path.parent.relative_to(ROOT)) for path in (ROOT / "graphrt").rglob("*.py")}
    mapped = folders(MAP)
    assert len(mapped) == len(set(mapped))
    assert set(mapped) == real


def test_the_architecture_map_lists_the_layers_in_order():
    inner = [path.removeprefix("graphrt/core/") for path in folders(MAP)]
    assert [name for name in inner if name in LAYERS] == list(LAYERS)
    assert ", ".join(f"`{name}`" for name in UPPER) in PAGE


# The name of a function inside of another one is not known before.
needs_qualified_names = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="a code object has its qualified name since Python 3.11"
)


@needs_qualified_names
def test_a_full_hit_calls_the_functions_the_architecture_page_lists(model, monkeypatch):
    monkeypatch.setattr(engine, "NativePath", None)
    assert not_in_order(walk_of(STEP), step_walk(model, "FULL")) == []


@needs_qualified_names
@pytest.mark.skipif(NativePath is None, reason="graphrt was built without its C part")
def test_the_c_path_replaces_three_listed_calls_of_a_step(model):
    trace = step_walk(model, "FULL")
    assert not_in_order(without(walk_of(STEP), IN_C), trace) == []
    assert [call for call in trace if call.function in IN_C] == []


@needs_qualified_names
def test_a_capture_calls_the_functions_the_architecture_page_lists(model):
    trace = capture_walk(model)
    assert not_in_order(without(walk_of(CAPTURE), NOT_ON_CPU), trace) == []
    assert [call for call in trace if call.function in NOT_ON_CPU] == []


def test_the_walk_check_finds_calls_in_another_order():
    first, second = Call("a.py", "One.run"), Call("b.py", "two")
    inner = Call("b.py", "two.<locals>.three")
    assert not_in_order([first, second], [first, inner]) == []
    assert not_in_order([second, first], [first, inner]) == [first]
    assert not_in_order([first, second], [first, Call("b.py", "two_more")]) == [second]
    assert not_in_order([first, first], [first]) == [first]


def test_every_function_in_the_listed_walks_exists():
    for file, name in walk_of(STEP) + walk_of(CAPTURE):
        body = ast.parse((ROOT / "graphrt" / file).read_text(encoding="utf-8")).body
        for part in name.split("."):
            nodes = [
                n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == part
            ]
            assert nodes, f"{file} has no {name}"
            body = nodes[0].body


def test_every_method_the_architecture_page_names_exists():
    classes: dict[str, set[str]] = {}
    for path in (ROOT / "graphrt").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, set()).update(members(node))
    named = set(re.findall(r"`([A-Z]\w+)\.(\w+)", PAGE))
    of_vllm = {"GPUModelRunner", "CUDAGraphWrapper"}
    missing = [each for each in named if each[1] not in classes.get(each[0], ())]
    assert len(named) > 30
    assert [each for each in missing if each[0] not in of_vllm] == []


def members(body: ast.ClassDef) -> set[str]:
    """Methods, fields, and attributes of `self`."""
    names = set()
    for node in ast.walk(body):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


def test_the_architecture_page_lists_step_and_capture_walks():
    assert len(walk_of(STEP)) > 8 and len(walk_of(CAPTURE)) > 15


@pytest.fixture(scope="module")
def site():
    """docs/site_pages.py, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_has_a_page_for_every_public_module(site):
    assert site.PUBLIC == PUBLIC


def test_the_reference_describes_every_public_name_once(site):
    homes = site.homes()
    assert {(module, name) for module in PUBLIC for name in homes[module]} == set(SURFACE)
    for module, names in homes.items():
        page = site.reference(module, names)
        for name, home in names.items():
            described = f"::: {module}.{name}" in page.splitlines()
            assert described == (home == module and f"{module}.{name}" not in PUBLIC)


def test_a_name_described_on_two_reference_pages_is_not_linked(site):
    html = "<code>with_graphs</code> <code>GraphRunner</code>"
    shown = site.on_page_content(html, SimpleNamespace(url="index.html"), None, None)
    assert re.findall('href="([^"]+)"', shown) == ["reference/graphrt.html#graphrt.GraphRunner"]


def test_a_path_on_a_page_links_to_its_page_or_source(site):
    paths = ("docs/concepts/trust.md", "examples/engine/", "no/such.py")
    html = "<p>" + "".join(f"<code>{path}</code>" for path in paths) + "</p>"
    shown = site.on_page_content(html, SimpleNamespace(url="how-to/engine.html"), None, None)
    source = f"{site.address('Source')}/blob/main"
    assert re.findall('href="([^"]+)"', shown) == [
        "../concepts/trust.html",
        f"{source}/examples/engine/",
    ]


def test_the_site_navigation_lists_every_document(site):
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = set(re.findall(r": ([\w./-]+\.md)$", settings, re.MULTILINE))
    docs = ROOT / "docs"
    assert pages == {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}


def test_no_question_of_the_table_of_places_is_there_twice() -> None:
    _, _, table = PAGE.partition("## Where is it, and where would I add it?")
    questions = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")]
    assert [each for each in questions if questions.count(each) > 1] == []


def test_every_name_of_the_table_of_places_is_in_the_code() -> None:
    _, _, table = PAGE.partition("## Where is it, and where would I add it?")
    sources = [*(ROOT / "graphrt").rglob("*.py"), *(ROOT / "native").glob("*.c")]
    words = {*re.findall(r"\w+", " ".join(path.read_text(encoding="utf-8") for path in sources))}
    names = [name.rpartition(".")[2] for name in re.findall(r"`@?([A-Za-z_.]+)`", table)]
    names = [name for name in names if name not in ("py", "c")]
    assert len(names) > 50 and [name for name in names if name not in words] == []
