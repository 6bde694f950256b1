"""What is in a key and what is not: sources, versions, settings."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from graphrt.compile import CompileOptions
from graphrt.compile.cache.key import versions
from graphrt.compile.cache.key.parts import CacheKey, code_settings
from graphrt.compile.cache.key.sources import TracedSources, code_digest, module_name
from graphrt.compile.cache.key.values import Values
from graphrt.compile.cache.key.versions import compiler_settings, runtime_versions
from graphrt.core.base.errors import InvalidOptionError
from tests.compile.cache_keys import cache_key

MODEL = """
from helper import scale

def forward(x):
    return scale(x) if x.shape[0] in {1, 2, 3} else x
"""
HELPER = "def scale(x):\n    return x * 2\n"
UNTRACED = "def unrelated():\n    return 1\n"


def write(directory: Path, **sources: str) -> None:
    package = directory / "net"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    for name, text in sources.items():
        (package / f"{name}.py").write_text(text)


def load(directory: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"net_{name}", directory / "net" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Not from a .pyc: sources that are edited within a second look the same to it.
    exec(compile(spec.loader.get_data(spec.origin), spec.origin, "exec"), module.__dict__)  # type: ignore[attr-defined]
    return module


def traced(directory: Path) -> CacheKey:
    sources = sources_of(load(directory, "model").forward, load(directory, "helper").scale)
    return cache_key({}, sources, versions={}, compiler={})


def sources_of(*functions: Any) -> TracedSources:
    sources = TracedSources()
    for each in functions:
        sources.add(each.__code__)
    return sources


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "source"
    write(directory, model=MODEL, helper=HELPER, untraced=UNTRACED)
    monkeypatch.setitem(sys.modules, "helper", load(directory, "helper"))
    return directory


def test_an_edited_traced_file_changes_the_key(tree: Path):
    before = traced(tree)
    write(tree, helper=HELPER.replace("2", "3"))
    after = traced(tree)
    assert after.digest != before.digest
    assert after.differences(before) == ["sources.net.helper: edited"]


def test_an_edited_untraced_file_leaves_the_key(tree: Path):
    before = traced(tree)
    write(tree, untraced=UNTRACED.replace("1", "2"))
    assert traced(tree) == before


def test_equal_sources_in_another_directory_have_an_equal_key(tree: Path, tmp_path: Path):
    write(tmp_path / "other" / "machine", model=MODEL, helper=HELPER)
    assert traced(tmp_path / "other" / "machine") == traced(tree)


def test_code_imported_before_an_edit_has_another_digest_than_the_edited_file(tree: Path):
    old = load(tree, "helper").scale
    write(tree, helper=HELPER.replace("2", "3"))
    stale, fresh = sources_of(old), sources_of(load(tree, "helper").scale)
    assert stale.digests() != fresh.digests()


def test_sources_are_taken_from_the_code_traced_by_dynamo(tree: Path):
    from torch._guards import TracingContext

    sources = TracedSources()

    def backend(graph: torch.fx.GraphModule, examples: object) -> object:
        for code in TracingContext.get().traced_code:
            sources.add(code)
        return graph.forward

    torch.compile(load(tree, "model").forward, backend=backend)(torch.ones(2))
    torch._dynamo.reset()
    assert set(sources.digests()) == {"net.model", "net.helper"}


def test_sources_of_torch_and_the_standard_library_are_left_out():
    sources = sources_of(torch.nn.Linear.forward, Path.exists, json.dumps, pytest.importorskip)
    assert list(sources.digests()) == ["_pytest.outcomes"]


def test_code_without_a_file_enters_the_key_by_its_bytecode():
    def made(text: str) -> dict[str, str]:
        space: dict[str, object] = {}
        exec(compile(text, f"<eval_with_key>.{len(text)}", "exec"), space)
        return sources_of(space["f"]).digests()

    one, other = made("def f(x): return x + 1"), made("def f(x): return x + 22")
    assert list(one) == list(other) == ["<eval_with_key>."]
    assert one != other
    assert made("def f(x): return x + 1") == one


def test_two_scripts_of_the_same_name_both_enter_the_key(tmp_path: Path):
    functions = {}
    for name in "ab":
        write(tmp_path / name, model=f"def f(x): return x + {ord(name)}")
        functions[name] = load(tmp_path / name, "model").f
    both, one = sources_of(functions["b"], functions["a"]), sources_of(functions["a"])
    assert list(both.digests()) == list(one.digests()) == ["net.model"]
    assert both.digests() != one.digests()
    assert sources_of(functions["a"], functions["b"]).digests() == both.digests()


def test_a_deleted_source_file_is_listed_as_unreadable(tree: Path):
    function = load(tree, "helper").scale
    (tree / "net" / "helper.py").unlink()
    sources = TracedSources()
    assert not sources.add(function.__code__) and not sources.add(function.__code__)
    assert [Path(each).name for each in sources.unreadable] == ["helper.py"]


def test_module_names_follow_from_file_paths(tree: Path):
    assert module_name(str(tree / "net" / "model.py")) == "net.model"
    assert module_name(str(tree / "net" / "__init__.py")) == "net"
    (tree / "net" / "layers").mkdir()
    assert module_name(str(tree / "net" / "layers" / "norm.py")) == "net.layers.norm"
    assert module_name("/nowhere/serve.py") == "serve"


def test_bytecode_digests_do_not_depend_on_the_process(tree: Path):
    here = Path(code_digest.__code__.co_filename).parents[4]
    # The order of texts in a set differs from process to process, that of small numbers does not.
    model = MODEL.replace("{1, 2, 3}", '{"one", "two", "three"}')
    assert model != MODEL
    text = (
        "import sys; sys.modules['torch'] = None; import types;"
        f"source = open({str(here / 'graphrt/compile/cache/key/sources.py')!r}).read();"
        "lines = source.splitlines();"
        "source = '\\n'.join(each for each in lines if not each.startswith('from graphrt'));"
        "space = {'__name__': 'x'}; exec(source, space);"
        f"code = compile({model!r}, 'm', 'exec'); print(space['code_digest'](code))"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", text],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(digests) == 1


# Settings and versions -------------------------------------------------------------------------


def settings_key(**options: object) -> CacheKey:
    settings = code_settings(CompileOptions.from_dict(options))
    return cache_key(settings, {}, versions={"torch": "2.13.0"}, compiler={})


@pytest.mark.parametrize(
    "options",
    [
        {"compile_sizes": [1, 2, 4]},
        {"save_format": "unpacked"},
        {"cache_dir": "/elsewhere"},
    ],
)
def test_options_that_do_not_change_code_leave_the_key(options: dict[str, object]):
    assert settings_key(**options) == settings_key()


@pytest.mark.parametrize(
    "options",
    [
        {"splitting_ops": ["aten::mm"]},
        {"backend": "inductor"},
        {"dynamic_shapes": "unbacked"},
        {"autotune": False},
        {"use_inductor_graph_partition": True},
    ],
)
def test_options_that_change_code_change_the_key(options: dict[str, object]):
    assert settings_key(**options).digest != settings_key().digest


def test_code_settings_have_only_options_that_change_code():
    settings = code_settings(CompileOptions(backend="inductor", cache_dir="/elsewhere"))
    assert settings == {
        "autotune": True,
        "backend": "inductor",
        "dynamic_shapes": "backed",
        "splitting_ops": None,
        "use_inductor_graph_partition": False,
    }


@pytest.mark.parametrize("name", sorted(runtime_versions()))
def test_every_runtime_version_changes_the_key(name: str):
    versions = runtime_versions()
    key = cache_key({}, {}, versions=versions, compiler={})
    other = cache_key({}, {}, versions={**versions, name: "another"}, compiler={})
    assert key.differences(other) == [f"versions.{name}: another -> {versions[name]}"]
    assert key.digest != other.digest


def test_runtime_versions_name_the_software_that_made_the_code():
    versions = runtime_versions("cpu")
    assert versions["torch"] == torch.__version__ and versions["device"] == "cpu"
    assert {"graphrt", "python", "machine", "cpu"} <= versions.keys()


class Driver:
    def __init__(self, number: int, status: int = 0) -> None:
        self.number, self.status = number, status

    def cuDriverGetVersion(self, place) -> int:
        place._obj.value = self.number
        return self.status


@pytest.mark.parametrize(
    ("driver", "version"),
    [(Driver(13000), "13.0"), (Driver(12080), "12.8"), (Driver(0, status=3), None), (None, None)],
)
def test_the_cuda_driver_version_is_in_the_key_on_a_gpu_only(monkeypatch, driver, version):
    def load(name: str) -> Driver:
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")
        return driver

    monkeypatch.setattr(versions.ctypes, "CDLL", load)
    monkeypatch.setattr(versions, "_device_name", lambda device: "cuda NVIDIA H100 9.0")
    versions.cuda_driver_version.cache_clear()
    runtime = runtime_versions("cuda")
    versions.cuda_driver_version.cache_clear()
    assert runtime.get("driver") == version and runtime["device"] == "cuda NVIDIA H100 9.0"
    assert "driver" not in runtime_versions("cpu")


def test_a_changed_inductor_setting_changes_the_key():
    from torch._inductor import config

    before = cache_key({}, {}, versions={})
    with config.patch(max_autotune=not config.max_autotune):
        after = cache_key({}, {}, versions={})
    assert [line.split(":")[0] for line in after.differences(before)] == [
        "compiler.inductor.max_autotune"
    ]
    assert cache_key({}, {}, versions={}) == before


def test_a_custom_inductor_pass_enters_the_key_by_its_uuid():
    from torch._inductor import config

    class Named:
        def __init__(self, name: bytes | None) -> None:
            self.name = name

        def uuid(self) -> bytes | None:
            return self.name

        def __call__(self, graph: object) -> None: ...

    def found(custom: object) -> object:
        with config.patch(post_grad_custom_post_pass=custom):
            return compiler_settings()["inductor.post_grad_custom_post_pass"]

    assert found(Named(b"a")) == found(Named(b"a")) != found(Named(b"b"))
    assert found(Named(None)) != found(Named(None)), "it asks not to be cached"
    assert found(lambda graph: 1) != found(lambda graph: 2)
    assert "inductor.post_grad_custom_post_pass" not in compiler_settings()


def test_a_key_is_equal_after_json_round_trip():
    key = cache_key({"sizes": (1, 2), "fast": None}, {"m": b"x"}, versions={}, compiler={"a": 1.5})
    assert CacheKey.from_groups(json.loads(key.to_json())) == key


@pytest.mark.parametrize("value", [object(), {1, 2}, Path("/x"), float("nan"), torch.float16])
def test_a_setting_that_is_not_plain_json_data_is_refused(value: object):
    with pytest.raises(InvalidOptionError, match="settings of a cache key"):
        cache_key({"odd": value}, {}, versions={}, compiler={})


def test_compiler_settings_in_the_key_are_json_types():
    assert json.loads(json.dumps(compiler_settings())) == compiler_settings()


FACTOR: ContextVar[float] = ContextVar("FACTOR")


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR.get()


def test_a_context_variable_enters_the_key_by_its_current_value():
    def described(factor: float) -> str:
        FACTOR.set(factor)
        return Values(TracedSources()).of(scaled)

    assert described(2.0) == described(2.0) != described(7.0)
