"""What decides whether compiled code may be used again: versions, settings and sources."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import metadata
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from graphrt.compile.cache.sources import TracedSources, code_digest, digests_of
from graphrt.compile.options import CompileOptions
from graphrt.core.base.errors import InvalidOptionError

Parts = dict[str, dict[str, Any]]

GROUPS = ("versions", "settings", "compiler", "sources")
_PASSES = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
)
_ADDRESS = re.compile(r"0x[0-9a-f]+")


@dataclass(frozen=True)
class CacheKey:
    """`digest` names an entry of the cache, `parts` are what it was made of."""

    digest: str
    parts: Parts

    @classmethod
    def of(
        cls,
        settings: Mapping[str, object],
        sources: TracedSources | Mapping[str, str | Path | bytes],
        *,
        versions: Mapping[str, str] | None = None,
        compiler: Mapping[str, object] | None = None,
    ) -> CacheKey:
        """The key of code made from `sources`: those of a trace, or contents and paths by module.

        `versions` are by default `runtime_versions()`, `compiler` is `compiler_settings()`.
        Settings are JSON types; raises `InvalidOptionError` for others.
        """
        traced = sources.digests() if isinstance(sources, TracedSources) else digests_of(sources)
        return cls.from_parts(
            {
                "versions": dict(runtime_versions() if versions is None else versions),
                "settings": dict(settings),
                "compiler": dict(compiler_settings() if compiler is None else compiler),
                "sources": traced,
            }
        )

    @classmethod
    def from_parts(cls, parts: Mapping[str, Mapping[str, object]]) -> CacheKey:
        """The key of these parts: what `to_json` wrote, or what `of` gathered."""
        plain = {group: _checked(group, parts.get(group, {})) for group in GROUPS}
        text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
        return cls(hashlib.sha256(text.encode()).hexdigest(), plain)

    def to_json(self) -> str:
        """For reading, and for `from_parts`."""
        return json.dumps(self.parts, indent=1, sort_keys=True) + "\n"

    def differences(self, other: CacheKey) -> list[str]:
        """What `self` has otherwise than `other`, as "versions.torch: 2.12.0 -> 2.13.0"."""
        return [
            line
            for group in GROUPS
            for line in _differences(group, other.parts[group], self.parts[group])
        ]


def code_settings(options: CompileOptions) -> dict[str, object]:
    """The options that compiled code depends on."""
    return {
        f"compile.{each.name}": getattr(options, each.name)
        for each in fields(options)
        if "cache" not in each.name and "save_format" not in each.name
    }


def runtime_versions(device: torch.device | str | None = None) -> dict[str, str]:
    """Versions of what makes or runs compiled code on `device` (the current accelerator, or CPU).

    The CPU's own features count on a CPU only: its compiled code uses all of them.
    """
    found = torch.device(device) if device is not None else _accelerator()
    versions = {
        "graphrt": f"{_graphrt_version()}+{_package_digest()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "machine": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "torch_git": torch.version.git_version,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "triton": _version("triton"),
        "torch_npu": _version("torch_npu"),
        "device": _device_name(found),
        "cpu": cpu_features() if found.type == "cpu" else None,
    }
    return {name: str(value) for name, value in versions.items() if value is not None}


def compiler_settings() -> dict[str, object]:
    """Every setting of Dynamo, AOTAutograd and Inductor that changes code, custom passes too."""
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    found: dict[str, object] = {}
    for prefix, config in (("dynamo", dynamo), ("functorch", functorch), ("inductor", inductor)):
        portable: Mapping[str, object] = config.save_config_portable()
        for name, value in portable.items():
            found[f"{prefix}.{name}"] = _plain(value)
    for name in _PASSES:
        value = getattr(inductor, name, None)
        if value is not None:
            found[f"inductor.{name}"] = _pass_identity(value)
    return found


# Parts ----------------------------------------------------------------------------------------


def _checked(group: str, values: Mapping[str, object]) -> dict[str, Any]:
    """JSON types only, so that what is read back equals what was written."""
    try:
        loaded: dict[str, Any] = json.loads(json.dumps(dict(values), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidOptionError(
            f"the {group} of a cache key cannot be compared",
            got=str(error),
            expected="strings, numbers, booleans, None, lists and dicts of them",
            advice="give the name or the digest of anything else",
        ) from error
    return loaded


def _differences(group: str, old: Mapping[str, object], new: Mapping[str, object]) -> Iterator[str]:
    for name in sorted(old.keys() | new.keys()):
        what = f"{group}.{name}"
        if name not in old:
            yield f"{what}: new"
        elif name not in new:
            yield f"{what}: gone"
        elif old[name] != new[name]:
            changed = f"{old[name]} -> {new[name]}"
            yield f"{what}: {'edited' if group == 'sources' else changed}"


def _plain(value: object) -> object:
    """A compiler's setting without paths or addresses of this machine."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return Path(value).name if os.path.isabs(value) else value
    if isinstance(value, Mapping):
        return {str(_plain(key)): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_plain(each)) for each in value)
    return _ADDRESS.sub("", repr(value))


def _pass_identity(value: object) -> object:
    """A pass says by `uuid` what it is; of another one its bytecode does."""
    if isinstance(value, (list, tuple)):
        return [_pass_identity(each) for each in value]
    uuid_of: Callable[[], object] | None = getattr(value, "uuid", None)
    if uuid_of is not None:
        identity = uuid_of()
        # None is torch's "do not cache me": such a key is never met again.
        return uuid.uuid4().hex if identity is None else _plain_bytes(identity)
    return sorted(f"{each.__qualname__} {code_digest(each.__code__)}" for each in _functions(value))


def _plain_bytes(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else _plain(value)


def _functions(value: object) -> Iterable[FunctionType]:
    if isinstance(value, FunctionType):
        return [value]
    return [each for each in vars(type(value)).values() if isinstance(each, FunctionType)]


# Versions -------------------------------------------------------------------------------------


def _graphrt_version() -> str:
    from graphrt import __version__

    return __version__


@cache
def _package_digest() -> str:
    """The code that splits and stitches decides about pieces as much as the compiler does."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _accelerator() -> torch.device:
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    module = torch.get_device_module(device)
    name = module.get_device_name(device) if hasattr(module, "get_device_name") else ""
    capability = getattr(module, "get_device_capability", None)
    version = capability(device) if capability is not None else None
    numbers = ".".join(map(str, version)) if isinstance(version, tuple) else ""
    return " ".join(filter(None, (device.type, name, numbers)))


@cache
def cpu_features() -> str:
    level = torch.backends.cpu.get_cpu_capability()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"{level} {platform.processor()}"
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    features = " ".join(sorted(flags[1].split())) if flags else ""
    return f"{level} {hashlib.sha256(features.encode()).hexdigest()[:12]}"
