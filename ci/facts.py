"""What ci/setup.sh must know about an interpreter and its torch, without importing torch.

    python ci/facts.py python             its version and where it lives
    python ci/facts.py torch [VERSION]    its torch: version, commit, place
    python ci/facts.py constraints FILE   FILE's pins as they fit beside its torch

`torch` exits with 3 where there is none and with 4 where graphrt cannot use it or it is not
VERSION. It prints the same line as long as the torch is the same build at the same place.
"""

from __future__ import annotations

import os
import platform
import re
import runpy
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

OLDEST_TORCH = (2, 11)

# Builds for a GPU name their triton themselves. CPU builds name none, and are tested with the same.
TRITON = {"2.11": "3.6.0", "2.12": "3.7.1", "2.13": "3.7.1", "2.14": "3.8.0", "2.15": "3.9.0"}

# What a torch's other needs ask for without saying so.
UNSAID = {"2.11": ["numpy<2.4"]}  # else Triton 3.6's interpreter turns no tensor into a number

# Not 1, which is also an exception's.
NO_TORCH, UNFIT_TORCH = 3, 4


def python_line() -> str:
    return f"{platform.python_version()} {os.path.realpath(sys.prefix)}"


def fits(version: str, wanted: str = "") -> bool:
    """If graphrt can use this torch; with `wanted`, if it is that one, of whatever build.

    A pre-release comes before its release, so 2.11.0a0 is older than 2.11, for pip as well.
    """
    public = version.split("+")[0]
    if wanted:
        return public == wanted
    numbers = re.match(r"(\d+)\.(\d+)(\.0)?(a|b|rc|\.dev)?", public)
    if numbers is None:
        return False
    release = (int(numbers[1]), int(numbers[2]))
    return release > OLDEST_TORCH or (release == OLDEST_TORCH and not numbers[4])


def torch_build() -> dict[str, str] | None:
    """Version, commit and place of the torch that `import torch` would find."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    place = Path(spec.origin).parent
    # Its metadata may lack the build: a wheel 2.11.0 says 2.11.0+cu130 here only.
    said = runpy.run_path(str(place / "version.py"))
    return {
        "version": str(said["__version__"]),
        "commit": str(said.get("git_version", "unknown")),
        "place": os.path.realpath(place),
    }


def pins(path: Path) -> dict[str, str]:
    """The lines of a constraints file whose markers hold here, by name."""
    from pip._vendor.packaging.requirements import Requirement
    from pip._vendor.packaging.utils import canonicalize_name

    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            pin = Requirement(line)
            if pin.marker is None or pin.marker.evaluate():
                found[canonicalize_name(pin.name)] = f"{pin.name}{pin.specifier}"
    return found


def torch_requirements() -> list[str]:
    try:
        return metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return []


def constraints(path: Path, torch_version: str, required_by_torch: list[str]) -> str:
    """`path`'s pins, but torch's is the torch in use, and where it refuses another pin, its
    own requirement stands instead; those are named in a comment.
    """
    # What pip itself decides by; every environment that can install has it.
    from pip._vendor.packaging.requirements import Requirement
    from pip._vendor.packaging.utils import canonicalize_name

    kept = pins(path)
    kept["torch"] = f"torch=={torch_version}"
    release = ".".join(torch_version.split(".")[:2])
    triton = TRITON.get(release)
    if triton is not None:
        kept["triton"] = f"triton=={triton}"
    followed = []
    for line in [*required_by_torch, *UNSAID.get(release, [])]:
        need = Requirement(line)
        name = canonicalize_name(need.name)
        if name not in kept or (need.marker and not need.marker.evaluate({"extra": ""})):
            continue
        pinned = str(Requirement(kept[name]).specifier).removeprefix("==")
        if not need.specifier.contains(pinned, prereleases=True):
            kept[name] = f"{need.name}{need.specifier}"
            followed.append(kept[name])
    lines = [f"# follows torch: {', '.join(followed)}"] if followed else []
    return "\n".join([*lines, *kept.values()])


def main(arguments: list[str]) -> int:
    if arguments == ["python"]:
        print(python_line())
        return 0
    if arguments[:1] == ["torch"] and len(arguments) <= 2:
        build = torch_build()
        if build is None:
            return NO_TORCH
        print(*build.values())
        return 0 if fits(build["version"], *arguments[1:]) else UNFIT_TORCH
    if arguments[:1] == ["constraints"] and len(arguments) == 2:
        try:
            version = metadata.version("torch")
        except metadata.PackageNotFoundError:
            sys.exit("torch was not installed by a package manager: pip would install another")
        print(constraints(Path(arguments[1]), version, torch_requirements()))
        return 0
    sys.exit(__doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
