"""What the site has beyond its files: the reference, made from docstrings, and links.

Names in the text lead to the reference, paths of the tree to their page or to the source, whose
address `[project.urls]` has.
"""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = (
    "graphrt",
    "graphrt.errors",
    "graphrt.platforms",
    "graphrt.types",
    "graphrt.lowlevel",
    "graphrt.compile",
    "graphrt.attention",
    "graphrt.observe",
    "graphrt.testing",
    "graphrt.cpu",
    "graphrt.cuda",
    "graphrt.ascend",
    "graphrt.accelerator",
    "graphrt.hosts.diffusers",
    "graphrt.hosts.vllm_ascend",
)
"""The modules whose `__all__` is the surface, a page each."""
DESCRIBED = (*PUBLIC, "graphrt.hosts.transformers")
"""The names of the last are not of the surface yet, and most users begin with them."""
FIRST = ("GraphRunner", "Plan", "Batch", "InputSpec", "Host", "GraphOptions")
"""With these names a reader begins; the others follow in the order of `__all__`."""


@functools.cache
def homes() -> dict[str, dict[str, str]]:
    """By module and public name, the module on whose page the object is described: the first."""
    described: dict[int, str] = {}
    pages: dict[str, dict[str, str]] = {}
    for module in DESCRIBED:
        exported = importlib.import_module(module)
        pages[module] = {
            name: described.setdefault(id(getattr(exported, name)), module)
            for name in exported.__all__
        }
    return pages


def page_of(module: str) -> str:
    return f"reference/{module}.md"


def reference(module: str, names: dict[str, str]) -> str:
    """The page of one module: its docstring, and its names."""
    exported = importlib.import_module(module)
    lines = [f"# {module}", "", exported.__doc__ or "", ""]
    first = [name for name in FIRST if name in names]
    for name in dict.fromkeys([*first, *names]):
        home = names[name]
        if f"{module}.{name}" in DESCRIBED:
            lines += [f"## `{name}`", "", f"The package [{module}.{name}]({module}.{name}.md).", ""]
        elif home == module:
            lines += [f"::: {module}.{name}", *_options(getattr(exported, name)), ""]
    elsewhere = {name: home for name, home in names.items() if home != module}
    if elsewhere:
        links = [f"[`{name}`]({home}.md#{home}.{name})" for name, home in elsewhere.items()]
        lines += ["## Described elsewhere", "", ", ".join(links), ""]
    return "\n".join(lines)


def _options(value: Any) -> list[str]:
    """The values of an enum and the fields of a tuple or dict are in no signature. Bases that are
    neither Python's nor on a page say nothing to a reader."""
    if not inspect.isclass(value):
        return []
    options = []
    if issubclass(value, (enum.Enum, tuple, dict)):
        options.append("      show_if_no_docstring: true")
    described = set[str]().union(*homes().values())
    if not any(b.__module__ == "builtins" or b.__name__ in described for b in value.__bases__):
        options.append("      show_bases: false")
    return ["    options:", *options] if options else []


def address(name: str) -> str:
    """One of `[project.urls]`; tomllib is of Python 3.11."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (url,) = re.findall(f'^{name} = "(.+)"$', project, re.MULTILINE)
    return str(url)


def on_config(config: Any) -> Any:
    # The page of a missing address is shown at any depth, so its links need the whole address.
    config.site_url = address("Documentation") + "/"
    pages = [{module: page_of(module)} for module in DESCRIBED]
    at = next(n for n, entry in enumerate(config.nav) if "Glossary" in entry)
    config.nav.insert(at, {"Reference": pages})
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for module, names in homes().items():
        page = File.generated(config, page_of(module), content=reference(module, names))
        files.append(page)
    return files


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Public names and paths in the text become links; tables are mended."""
    # A corner without a word is no header, though Markdown knows no other cell there.
    html = _EMPTY_HEADER.sub("<td></td>", html)
    top = "../" * page.url.count("/")
    parts = _UNTOUCHED.split(html)
    # What the pattern matched, to be left as it is, stands at the odd places.
    parts[::2] = [
        _PATH.sub(
            lambda match: _to_the_tree(match, top),
            _NAME.sub(lambda match: _linked(match, top), part),
        )
        for part in parts[::2]
    ]
    return "".join(parts)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """The theme's search is a dialog without a name, which a screen reader needs."""
    return output.replace('role="dialog">', 'role="dialog" aria-label="Search">')


def on_post_template(output: str, template_name: str, config: Any) -> str:
    """The same for the page of a missing address, which is made of no Markdown."""
    return on_post_page(output, None, config)


_EMPTY_HEADER = re.compile(r"<th[^>]*></th>")
_UNTOUCHED = re.compile(r"(<pre.*?</pre>|<a .*?</a>|<h\d.*?</h\d>)", re.DOTALL)
_NAME = re.compile(r"<code>(graphrt\.\w+|\w+)([.(][^<]*)?</code>")
_PATH = re.compile(r"<code>([\w.-]+/[\w./-]*)</code>")


@functools.cache
def _anchors() -> dict[str, str]:
    """Where a name is described, for those that can mean nothing else."""
    anchors = {module: page_of(module).replace(".md", ".html") for module in DESCRIBED}
    places: dict[str, set[str]] = {}
    for names in homes().values():
        for name, home in names.items():
            if name[0].isupper() or "_" in name.strip("_"):
                places.setdefault(name, set()).add(f"{anchors[home]}#{home}.{name}")
    # `with_graphs` is transformers' and diffusers'.
    return anchors | {name: place for name, (place, *others) in places.items() if not others}


def _linked(match: re.Match[str], top: str) -> str:
    anchor = _anchors().get(match[1])
    return match[0] if anchor is None else f'<a href="{top}{anchor}">{match[0]}</a>'


def _to_the_tree(match: re.Match[str], top: str) -> str:
    path = match[1]
    if not (ROOT / path).exists():
        return match[0]
    if path.startswith("docs/") and path.endswith(".md"):
        page = top + path.removeprefix("docs/").replace(".md", ".html")
    else:
        page = f"{address('Source')}/blob/main/{path}"
    return f'<a href="{page}">{match[0]}</a>'
