"""ci/setup.sh on interpreters that only pretend: no network, no real environment, no torch."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pip
import pytest

ROOT = Path(__file__).resolve().parent.parent
PIP_NOISE = "WARNING: Location 'somewhere' is ignored"

# Does what ci/setup.sh asks of a Python. Anything else goes to a real one, which sees the modules
# in `site` beside it and no others. What pip is called with is written down in $CALLS.
PRETENDED = r"""#!/usr/bin/env bash
home=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
read -r version host <"$home/identity"
modules=$home/site${host:+:$host/site}
case "$*" in
-V) echo "Python $version" ;;
"-m venv "*)
    shift 2
    echo "venv $*" >>"$CALLS"
    made=${@: -1}/bin
    mkdir -p "$made/site"
    cp "$home/python" "$made/python"
    echo "$version $(case "$*" in *--system-site-packages*) echo "$home" ;; esac)" >"$made/identity"
    ;;
"-m pip "*uninstall*) ;;
"-m pip "*)
    shift 2
    echo "pip $*" >>"$CALLS"
    echo "$PIP_NOISE" >&2
    case "$*" in
    *--no-index*) [ -n "${ALL_THERE:-}" ] ;;
    *torch==*)
        [ -z "${NO_TORCH_THERE:-}" ] || { echo "ERROR: No matching distribution" >&2; exit 1; }
        cp -r "$TORCHES/$(sed 's/.*torch==//' <<<"$*")/." "$home/site"
        ;;
    *)
        [ -z "${MISSING:-}" ] || { echo "ERROR: Cannot install $MISSING" >&2; exit 1; }
        [ -z "${REPLACES:-}" ] || cp -r "$TORCHES/$REPLACES/." "$home/site"
        ;;
    esac
    ;;
"ci/facts.py python") echo "$version $home" ;;
*) PYTHONPATH=$modules:$TOOLS exec "$REAL" -S "$@" ;;
esac
"""


def make_torch(site: Path, version: str, *needs: str, wheel: str = "") -> None:
    """The parts of an installed torch that are looked at; `wheel` is its metadata's version."""
    package = site / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from .version import __version__\n")
    (package / "version.py").write_text(f"__version__ = {version!r}\ngit_version = 'abc'\n")
    info = site / f"torch-{wheel or version}.dist-info"
    info.mkdir()
    lines = [f"Name: torch\nVersion: {wheel or version}", *(f"Requires-Dist: {n}" for n in needs)]
    (info / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")


class Checkout:
    """A copy of what set-up reads, and interpreters to run it on."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        self.calls_file = folder / "calls"
        self.torches = folder / "torches"
        self.tools = folder / "tools"
        shutil.copytree(ROOT / "ci", self.root / "ci")
        for name in ("pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.root)
        self.tools.mkdir()
        (self.tools / "pip").symlink_to(Path(pip.__file__).parent)
        # No accelerator is found, whatever this machine has.
        for name in ("nvidia-smi", "npu-smi"):
            (self.tools / name).write_text("#!/bin/sh\nexit 1\n")
            (self.tools / name).chmod(0o755)

    def interpreter(self, name: str, version: str = "3.11.7") -> Path:
        home = self.root.parent / name
        (home / "site").mkdir(parents=True)
        (home / "identity").write_text(f"{version}\n")
        (home / "python").write_text(PRETENDED)
        (home / "python").chmod(0o755)
        return home / "python"

    def setup(
        self, python: Path, extra: str = "test", **variables: str
    ) -> subprocess.CompletedProcess[str]:
        self.calls_file.write_text("")
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("GRAPHRT", "PIP_"))}
        environ |= {"PYTHON": str(python), "CALLS": str(self.calls_file), "REAL": sys.executable}
        environ |= {"TORCHES": str(self.torches), "TOOLS": str(self.tools), "VENV": ".venv"}
        environ |= {"PATH": f"{self.tools}:{environ['PATH']}", "PIP_NOISE": PIP_NOISE}
        return subprocess.run(
            ["bash", "ci/setup.sh", extra],
            cwd=self.root,
            env=environ | variables,
            capture_output=True,
            text=True,
            check=False,
        )

    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines()

    def constraints(self) -> list[str]:
        return (self.root / ".venv" / "constraints.txt").read_text().splitlines()

    @property
    def site(self) -> Path:
        return self.root / ".venv" / "bin" / "site"


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = Checkout(tmp_path)
    make_torch(made.torches / "2.13.0+cpu", "2.13.0+cpu", "setuptools>=77.0.3")
    make_torch(made.torches / "2.14.1+cpu", "2.14.1+cpu", "setuptools>=77.0.3")
    return made


@pytest.fixture
def with_cuda_torch(checkout: Checkout) -> Path:
    """An interpreter with the CUDA build of torch 2.11, as GPU machines have it."""
    python = checkout.interpreter("gpu")
    needs = ("setuptools<82", 'triton==3.6.0; platform_system == "Linux"', 'pyyaml; extra == "x"')
    make_torch(python.parent / "site", "2.11.0+cu130", *needs, wheel="2.11.0")
    return python


def succeeded(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    assert PIP_NOISE not in done.stdout + done.stderr
    return done.stdout.splitlines()


def test_setup_installs_the_cpu_build_of_torch_once(checkout: Checkout) -> None:
    python = checkout.interpreter("bare")
    lines = succeeded(checkout.setup(python))
    assert all(line.startswith("setup: ") for line in lines)
    assert lines[-1] == "setup: test is ready in .venv: Python 3.11.7, torch 2.13.0+cpu"
    assert [call for call in checkout.calls() if "torch==" in call] == [
        "pip --no-input install torch==2.13.0+cpu"
    ]
    assert {"torch==2.13.0+cpu", "triton==3.7.1"} <= set(checkout.constraints())

    assert succeeded(checkout.setup(python)) == lines[-1:]
    assert checkout.calls() == []


def test_setup_pins_an_installed_torch_and_matching_packages(
    checkout: Checkout, with_cuda_torch: Path
) -> None:
    lines = succeeded(checkout.setup(with_cuda_torch))
    assert lines[-1].endswith("torch 2.11.0+cu130")
    assert any("asks for setuptools<82" in line for line in lines)
    assert "venv --system-site-packages .venv" in checkout.calls()
    assert not any("torch==" in call for call in checkout.calls())
    assert {"torch==2.11.0", "setuptools<82", "triton==3.6.0"} <= set(checkout.constraints())
    assert not checkout.site.joinpath("torch").exists()


def test_setup_with_everything_installed_uses_no_index(
    checkout: Checkout, with_cuda_torch: Path
) -> None:
    succeeded(checkout.setup(with_cuda_torch, ALL_THERE="1"))
    installs = [call for call in checkout.calls() if "--editable" in call]
    assert len(installs) == 1
    assert "--no-index" in installs[0]
    stays = re.search(r"--constraint (\S+)", installs[0])
    assert stays is not None
    assert (checkout.root / stays[1]).read_text() == "torch==2.11.0\n"


def test_setup_fails_if_an_install_replaced_torch(
    checkout: Checkout, with_cuda_torch: Path
) -> None:
    for _ in range(2):  # nothing is marked as done
        done = checkout.setup(with_cuda_torch, REPLACES="2.13.0+cpu")
        assert done.returncode == 1
        shutil.rmtree(checkout.root / ".venv")
    assert "changed the torch" in done.stderr
    assert "2.11.0+cu130" in done.stderr
    assert "2.13.0+cpu" in done.stderr


def test_setup_names_a_package_that_cannot_be_installed(
    checkout: Checkout, with_cuda_torch: Path
) -> None:
    done = checkout.setup(with_cuda_torch, MISSING="hypothesis==6.170.15")
    assert done.returncode == 1
    assert PIP_NOISE in done.stderr
    assert "setup: Cannot install hypothesis==6.170.15" in done.stderr
    assert "beside torch 2.11.0+cu130, which stays as it is" in done.stderr


def test_setup_without_a_cpu_build_of_torch_gives_advice(checkout: Checkout) -> None:
    done = checkout.setup(checkout.interpreter("bare"), NO_TORCH_THERE="1")
    assert done.returncode == 1
    assert "no torch==2.13.0+cpu for Python 3.11.7" in done.stderr
    assert "GRAPHRT_TORCH_BUILD=any" in done.stderr


def test_setup_with_another_python_rebuilds_the_environment(checkout: Checkout) -> None:
    first, second = checkout.interpreter("first"), checkout.interpreter("second", "3.12.1")
    succeeded(checkout.setup(first))
    lines = succeeded(checkout.setup(second))
    assert "setup: .venv was made for another Python or torch and is made anew; it was for" in lines
    assert lines[-1] == "setup: test is ready in .venv: Python 3.12.1, torch 2.13.0+cpu"
    assert [path.name for path in checkout.root.glob(".venv*")] == [".venv"]


def test_setup_keeps_the_old_environment_if_a_rebuild_fails(checkout: Checkout) -> None:
    first, second = checkout.interpreter("first"), checkout.interpreter("second", "3.12.1")
    ready = succeeded(checkout.setup(first))[-1:]
    failed = checkout.setup(second, NO_TORCH_THERE="1")
    assert failed.returncode == 1
    assert failed.stdout.splitlines()[-1] == "setup: .venv is again what it was"
    assert succeeded(checkout.setup(first)) == ready
    assert checkout.calls() == []


@pytest.mark.long
def test_setup_with_another_installed_torch_rebuilds_the_environment(
    checkout: Checkout, with_cuda_torch: Path
) -> None:
    succeeded(checkout.setup(with_cuda_torch))
    site = with_cuda_torch.parent / "site"
    shutil.rmtree(site)
    make_torch(site, "2.12.1+cu130", "triton==3.7.1", wheel="2.12.1")
    lines = succeeded(checkout.setup(with_cuda_torch))
    assert lines[-1].endswith("torch 2.12.1+cu130")
    assert {"torch==2.12.1", "triton==3.7.1"} <= set(checkout.constraints())


@pytest.mark.long
def test_setup_keeps_a_torch_installed_by_hand(checkout: Checkout) -> None:
    python = checkout.interpreter("bare")
    succeeded(checkout.setup(python))
    for old in checkout.site.glob("torch*"):
        shutil.rmtree(old)
    make_torch(checkout.site, "2.15.0+cu130", wheel="2.15.0")
    lines = succeeded(checkout.setup(python))
    assert lines[-1].endswith("torch 2.15.0+cu130")
    assert not any("torch==" in call for call in checkout.calls())
    assert "torch==2.15.0" in checkout.constraints()


@pytest.mark.long
def test_setup_installs_only_the_torch_named_by_graphrt_torch(
    checkout: Checkout, with_cuda_torch: Path
) -> None:
    lines = succeeded(checkout.setup(with_cuda_torch, GRAPHRT_TORCH="2.14.1"))
    assert any("torch 2.11.0+cu130 of" in line and "left alone" in line for line in lines)
    assert lines[-1].endswith("torch 2.14.1+cpu")
    for old in checkout.site.glob("torch*"):
        shutil.rmtree(old)
    make_torch(checkout.site, "2.12.1")
    done = checkout.setup(with_cuda_torch, GRAPHRT_TORCH="2.14.1")
    assert done.returncode == 1
    assert ".venv has torch 2.12.1" in done.stderr
    assert "not 2.14.1; it is not replaced" in done.stderr


def test_setup_fails_if_the_installed_torch_cannot_be_imported(
    checkout: Checkout, with_cuda_torch: Path
) -> None:
    package = with_cuda_torch.parent / "site" / "torch"
    (package / "__init__.py").write_text("raise ImportError('libcudart.so.13 is missing')\n")
    done = checkout.setup(with_cuda_torch)
    assert done.returncode == 1
    assert "torch 2.11.0+cu130 cannot be imported" in done.stderr
    assert "libcudart.so.13 is missing" in done.stderr


def test_setup_refuses_an_environment_made_by_something_else(checkout: Checkout) -> None:
    python = checkout.interpreter("new", "3.12.1")
    theirs = checkout.interpreter("checkout/.venv/bin", "3.10.13")
    done = checkout.setup(python)
    assert done.returncode == 1
    assert "has no mark of ci/setup.sh" in done.stderr
    assert theirs.exists()


@pytest.mark.long
def test_setup_installs_again_after_changed_constraints(checkout: Checkout) -> None:
    python = checkout.interpreter("bare")
    succeeded(checkout.setup(python))
    with (checkout.root / "constraints.txt").open("a") as constraints:
        constraints.write("attrs==26.1.0\n")
    succeeded(checkout.setup(python))
    assert any("--editable .[test]" in call for call in checkout.calls())
    assert "attrs==26.1.0" in checkout.constraints()


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("2.11.0", "", True),
        ("2.11.0a0+git12.nv26", "", False),  # pip would not take it for torch>=2.11 either
        ("2.11.1+cu130", "", True),
        ("2.12.0a0+git12", "", True),
        ("2.10.9", "", False),
        ("3.0.0", "", True),
        ("unknown", "", False),
        ("2.13.0+cpu", "2.13.0", True),
        ("2.13.1", "2.13.0", False),
    ],
)
def test_a_torch_version_fits_the_wanted_version_as_tabled(
    version: str, wanted: str, fits: bool
) -> None:
    assert load(ROOT / "ci" / "facts.py").fits(version, wanted) is fits


def test_ci_matrix_rows_agree_with_the_declared_python_and_torch_versions() -> None:
    rows = load(ROOT / "ci" / "matrix.py").read_rows()
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pythons = set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', declared))
    assert {row["python"] for row in rows} - {""} == pythons
    oldest = min(pythons, key=lambda version: int(version.split(".")[1]))
    assert f'requires-python = ">={oldest}"' in declared

    facts = load(ROOT / "ci" / "facts.py")
    torches = {".".join(row["torch"].split(".")[:2]) for row in rows} - {""}
    assert torches == set(facts.TRITON)
    assert '"torch>={}.{}"'.format(*facts.OLDEST_TORCH) in declared
    simulated = next(row for row in rows if row.get("target") == "test-ascend")
    assert f"ASCEND_TORCH = {simulated['torch']}\n" in (ROOT / "Makefile").read_text()
    simulator = (ROOT / "packages" / "graphrt-ascend-sim" / "pyproject.toml").read_text()
    version = ".".join(simulated["torch"].split(".")[:2])
    assert f'"torch-npu>={version}"' in simulator


def test_a_ci_row_without_a_full_torch_version_is_refused(tmp_path: Path) -> None:
    row = {"name": "a", "runner": "b", "python": "3.11", "torch": "2.13", "enabled": True}
    path = tmp_path / "matrix.json"
    path.write_text(json.dumps({"rows": [row]}))
    with pytest.raises(SystemExit, match=r"a torch like 2\.13\.0"):
        load(ROOT / "ci" / "matrix.py").read_rows(path)


def test_a_ci_row_run_on_another_python_is_refused(tmp_path: Path) -> None:
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    rows = load(ROOT / "ci" / "matrix.py").read_rows()
    other = next(row["name"] for row in rows if row["python"] not in ("", python))
    done = subprocess.run(
        ["bash", str(ROOT / "ci" / "run_row.sh"), other],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"is Python {python}" in done.stderr


def test_the_tests_refuse_a_torch_other_than_graphrt_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    conftest = load(ROOT / "tests" / "conftest.py")
    conftest.pytest_configure()
    monkeypatch.setenv("GRAPHRT_TORCH", "2.0.0")
    with pytest.raises(pytest.UsageError, match=r"for torch 2\.0\.0"):
        conftest.pytest_configure()


def test_the_tests_of_a_ci_row_refuse_a_build_without_c(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "GRAPHRT_NATIVE:-1" in (ROOT / "ci" / "run_row.sh").read_text()
    conftest = load(ROOT / "tests" / "conftest.py")
    monkeypatch.setattr(conftest, "native_state", "it was not built")
    monkeypatch.delenv("GRAPHRT_NATIVE", raising=False)
    conftest.pytest_configure()
    monkeypatch.setenv("GRAPHRT_NATIVE", "1")
    with pytest.raises(pytest.UsageError, match="C part, but it was not built"):
        conftest.pytest_configure()


@pytest.mark.skipif(
    not os.environ.get("GRAPHRT_TEST_SETUP"),
    reason="makes a real environment, minutes on a busy machine: GRAPHRT_TEST_SETUP=1",
)
def test_setup_of_a_real_environment_keeps_this_pythons_torch(tmp_path: Path) -> None:
    environ = os.environ | {"PYTHON": sys.executable, "VENV": str(tmp_path / "venv")}
    environ.pop("PYTHONPATH", None)
    done = subprocess.run(
        ["bash", str(ROOT / "ci" / "setup.sh"), "test"],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ask = "import torch, graphrt; print(torch.__file__)"
    places = [
        subprocess.check_output([python, "-c", ask], text=True, env=environ, cwd=ROOT)
        for python in (sys.executable, str(tmp_path / "venv" / "bin" / "python"))
    ]
    assert places[0] == places[1]
