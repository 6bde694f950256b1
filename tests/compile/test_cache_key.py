"""What is in a key and what is not: code, versions, settings."""

from __future__ import annotations

import json
import subprocess
import sys
from contextvars import ContextVar
from pathlib import Path
from types import CodeType

import pytest
import torch

from graphrt.compile import CompileOptions
from graphrt.compile.cache.key import versions
from graphrt.compile.cache.key.code import code_digest, is_library
from graphrt.compile.cache.key.parts import CacheKey, code_settings
from graphrt.compile.cache.key.values import Values
from graphrt.compile.cache.key.versions import compiler_settings, runtime_versions
from graphrt.core.base.errors import InvalidOptionError
from tests.compile.cache_keys import cache_key


def digest_of(source: str) -> str:
    code = compile(source, "a file", "exec")
    return code_digest(next(each for each in code.co_consts if isinstance(each, CodeType)))


FUNCTION = """
def f(x, by=1):
    total = x + by
    for each in (1, 2):
        total = g(total, each)
    return total
"""
ALIKE = {
    "a comment": FUNCTION.replace("    for", "    # why\n    for"),
    "a docstring": FUNCTION.replace("):\n", '):\n    """It adds."""\n', 1),
    "lines": FUNCTION.replace(
        "g(total, each)", "g(\n            total,\n            each,\n        )"
    ),
    "a local variable": FUNCTION.replace("total", "result"),
    "annotations": FUNCTION.replace("x, by=1", "x: int, by: int = 1"),
}
OTHER = {
    "a constant": FUNCTION.replace("(1, 2)", "(1, 3)"),
    "a constant's type": FUNCTION.replace("(1, 2)", "(1, 2.0)"),
    "an operator": FUNCTION.replace("x + by", "x - by"),
    "an argument's name": FUNCTION.replace("by", "other"),
    "the order of arguments": FUNCTION.replace("g(total, each)", "g(each, total)"),
    "the number of arguments": FUNCTION.replace("g(total, each)", "g(total, each, each)"),
    "a global's name": FUNCTION.replace("g(", "h("),
    "a keyword": FUNCTION.replace("g(total, each)", "g(total, to=each)"),
    "another keyword": FUNCTION.replace("g(total, each)", "g(total, by=each)"),
    "an attribute": FUNCTION.replace("g(", "x.g("),
    "an inner function": FUNCTION.replace("return total", "return lambda: total"),
    "what an inner function does": FUNCTION.replace("return total", "return lambda: total + 1"),
    "whether an error is caught": FUNCTION.replace(
        "    return total",
        "    try:\n        g(x)\n    except ValueError:\n        g(x)\n    return total",
    ),
    "what is unpacked": FUNCTION.replace("total = x + by", "total, _ = x + by"),
}


@pytest.mark.parametrize("change", ALIKE)
def test_code_that_computes_the_same_in_other_words_has_the_same_digest(change: str):
    assert digest_of(ALIKE[change]) == digest_of(FUNCTION)


def test_code_that_computes_something_else_has_another_digest():
    digests = {name: digest_of(source) for name, source in {"": FUNCTION, **OTHER}.items()}
    assert len(set(digests.values())) == len(OTHER) + 1, digests


MODEL = """
def forward(x):
    return scale(x) if x.shape[0] in {1, 2, 3} else x
"""


def test_bytecode_digests_do_not_depend_on_the_process():
    here = Path(is_library.__code__.co_filename).parents[4]
    # The order of texts in a set differs from process to process, that of small numbers does not.
    model = MODEL.replace("{1, 2, 3}", '{"one", "two", "three"}')
    assert model != MODEL
    text = (
        "import sys; sys.modules['torch'] = None; import types;"
        f"source = open({str(here / 'graphrt/compile/cache/key/code.py')!r}).read();"
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
            return compiler_settings(Values())["inductor.post_grad_custom_post_pass"]

    assert found(Named(b"a")) == found(Named(b"a")) != found(Named(b"b"))
    assert found(Named(None)) != found(Named(None)), "it asks not to be cached"
    assert found(lambda graph: 1) != found(lambda graph: 2)
    assert "inductor.post_grad_custom_post_pass" not in compiler_settings(Values())


def test_a_key_is_equal_after_json_round_trip():
    key = cache_key({"sizes": (1, 2), "fast": None}, {"m": b"x"}, versions={}, compiler={"a": 1.5})
    assert CacheKey.from_groups(json.loads(key.to_json())) == key


@pytest.mark.parametrize("value", [object(), {1, 2}, Path("/x"), float("nan"), torch.float16])
def test_a_setting_that_is_not_plain_json_data_is_refused(value: object):
    with pytest.raises(InvalidOptionError, match="settings of a cache key"):
        cache_key({"odd": value}, {}, versions={}, compiler={})


def test_compiler_settings_in_the_key_are_json_types():
    assert json.loads(json.dumps(compiler_settings(Values()))) == compiler_settings(Values())


FACTOR: ContextVar[float] = ContextVar("FACTOR")


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR.get()


def test_a_context_variable_enters_the_key_by_its_current_value():
    def described(factor: float) -> str:
        FACTOR.set(factor)
        return Values().of(scaled)

    assert described(2.0) == described(2.0) != described(7.0)
