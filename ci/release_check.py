"""Whether what is about to be released belongs together.

    python ci/release_check.py TAG [DIST]
    python ci/release_check.py --notes     # prints the changelog's section

The tag is "v" and the version of `graphrt/_version.py`, and docs/changelog.md has a section of it
with at least one line. DIST, a folder, has the sdist, the wheel without the C part, and one with it
for each Python of pyproject.toml's classifiers and each machine of `MACHINES`, and nothing else.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MACHINES = ("x86_64", "aarch64")


def version(root: Path = ROOT) -> str:
    text = (root / "graphrt" / "_version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert match is not None, "graphrt/_version.py has no version"
    return match[1]


def pythons(root: Path = ROOT) -> list[str]:
    """The tags of CPython that wheels are made for: cp310, ..."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    minors = re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', text)
    return [f"cp3{minor}" for minor in minors]


def notes(root: Path = ROOT) -> str:
    """The changelog's section of the version; empty if there is none."""
    text = (root / "docs" / "changelog.md").read_text(encoding="utf-8")
    for section in text.split("\n## ")[1:]:
        title, _, lines = section.partition("\n")
        if title.split()[0] == version(root):
            return lines.strip()
    return ""


def wanted(root: Path = ROOT) -> list[str]:
    """The names of a release's files, as patterns."""
    now = version(root)
    wheels = [
        rf"graphrt-{now}-{python}-{python}-manylinux[\w.]*_{machine}\.whl"
        for python in pythons(root)
        for machine in MACHINES
    ]
    return [rf"graphrt-{now}\.tar\.gz", rf"graphrt-{now}-py3-none-any\.whl", *wheels]


def problems(tag: str, dist: Path | None = None, root: Path = ROOT) -> list[str]:
    found = []
    if tag != f"v{version(root)}":
        found.append(f"the tag {tag} is not v{version(root)}, as graphrt/_version.py says")
    if not notes(root):
        found.append(f'docs/changelog.md has no section "## {version(root)}" with a line in it')
    if dist is not None:
        names, patterns = [each.name for each in dist.iterdir()], wanted(root)
        for each in patterns:
            if not any(re.fullmatch(each, name) for name in names):
                found.append(f"{dist} has no {each}")
        for name in names:
            if not any(re.fullmatch(each, name) for each in patterns):
                found.append(f"{dist} has {name!r}, which is no file of this release")
    return found


def main() -> int:
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    if sys.argv[1] == "--notes":
        print(notes())
        return 0
    found = problems(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) == 3 else None)
    for each in found:
        print(f"release: {each}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
