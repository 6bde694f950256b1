"""Discovery of platforms and the choice of the current one."""

from __future__ import annotations

import os
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pluggy
import pytest

from graphrt.core.base.errors import (
    PlatformError,
)
from graphrt.core.device import registry as plugins
from graphrt.core.device.platform import Availability, Platform
from graphrt.core.device.registry import PlatformRegistry, PluginWarning, hookimpl, resolve_platform
from tests import starts


class StubPlatform(Platform):
    device_type = "cpu"

    def __init__(self, name: str, available: bool = True, reason: str = "no such device") -> None:
        self.name = name
        self.asked = 0
        self._answer = Availability(available, "" if available else reason)

    def availability(self) -> Availability:
        self.asked += 1
        return self._answer

    def get_static_graph_wrapper_cls(self) -> str:
        return "stub.Wrapper"

    def new_memory(self) -> Any: ...

    def new_graph(self) -> Any: ...

    def begin_capture(self, graph: Any, memory: Any) -> None: ...

    def end_capture(self, graph: Any) -> None: ...

    def abort_capture(self, graph: Any) -> None: ...


class Plugin:
    """A plugin that gives what it is made with; an exception is raised."""

    def __init__(self, result: object) -> None:
        self.result = result
        self.calls = 0

    @hookimpl
    def graphrt_platforms(self) -> Any:
        self.calls += 1
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAPHRT_PLATFORM", raising=False)


@pytest.fixture
def built_ins() -> Iterator[types.ModuleType]:
    """An importable module with built-in platforms: npu (not available), gpu, cpu."""
    module: Any = types.ModuleType("stub_built_ins")
    module.Npu = lambda: StubPlatform("npu", available=False, reason="no NPU driver")
    module.Gpu = lambda: StubPlatform("gpu")
    module.Cpu = lambda: StubPlatform("cpu")
    module.__spec__ = importlib_spec("stub_built_ins")
    sys.modules["stub_built_ins"] = module
    yield module
    del sys.modules["stub_built_ins"]


def importlib_spec(name: str) -> Any:
    from importlib.machinery import ModuleSpec

    return ModuleSpec(name, loader=None)


def table(*names: str) -> dict[str, str]:
    return {name: f"stub_built_ins:{name.capitalize()}" for name in names}


def registry(*results: object, built_ins: dict[str, str] | None = None) -> PlatformRegistry:
    made = PlatformRegistry(built_ins or {}, group=None)
    for index, result in enumerate(results):
        made.register(Plugin(result), f"plugin{index}")
    return made


# Choosing ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("built_ins")
def test_the_first_available_built_in_platform_is_the_current_platform() -> None:
    assert registry(built_ins=table("npu", "gpu", "cpu")).current().name == "gpu"
    assert registry(built_ins=table("npu", "cpu")).current().name == "cpu"


@pytest.mark.usefixtures("built_ins")
def test_an_available_out_of_tree_platform_goes_before_built_ins() -> None:
    mine, off = StubPlatform("mine"), StubPlatform("off", available=False)
    assert registry(mine, off, built_ins=table("gpu", "cpu")).current() is mine
    assert registry(off, built_ins=table("gpu", "cpu")).current().name == "gpu"


def test_a_by_name_only_platform_is_chosen_and_started_only_when_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in, real, cpu = StubPlatform("npu-sim"), StubPlatform("npu"), StubPlatform("cpu")
    stand_in.by_name_only, stand_in.device_type = True, "npu"
    real.device_type = "npu"
    started: list[str] = []
    for each in (stand_in, real, cpu):
        monkeypatch.setattr(each, "start", lambda name=each.name: started.append(name))
    assert registry(stand_in, cpu).current() is cpu
    known_platforms = registry([stand_in, real], cpu)
    assert known_platforms.get("npu-sim", must_be_available=False) is stand_in
    assert (stand_in.asked, started) == (0, ["cpu"])
    assert known_platforms.get("npu-sim") is stand_in
    # It makes the platform of the real device look available, which it is not.
    assert known_platforms.current() is cpu
    assert known_platforms.current({"GRAPHRT_PLATFORM": "npu-sim"}) is stand_in
    assert started == ["cpu", "npu-sim", "cpu", "npu-sim"]
    assert resolve_platform(stand_in) is stand_in and started[4:] == ["npu-sim"]


def test_the_environment_variable_forces_a_platform_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known_platforms = registry([StubPlatform("one"), StubPlatform("two")])
    monkeypatch.setenv("GRAPHRT_PLATFORM", "two")
    assert known_platforms.current().name == "two"
    assert known_platforms.current({"GRAPHRT_PLATFORM": "one"}).name == "one"


def test_an_empty_environment_variable_forces_no_platform() -> None:
    assert registry(StubPlatform("one")).current({"GRAPHRT_PLATFORM": " "}).name == "one"


def test_forcing_an_unknown_platform_raises_and_lists_the_known_platforms() -> None:
    known_platforms = registry([StubPlatform("one"), StubPlatform("two", available=False)])
    with pytest.raises(PlatformError, match=r"'three'\n.*one, two"):
        known_platforms.current({"GRAPHRT_PLATFORM": "three"})


def test_forcing_an_unavailable_platform_raises_with_its_reason() -> None:
    known_platforms = registry([StubPlatform("off", False, "driver too old"), StubPlatform("on")])
    with pytest.raises(PlatformError, match="driver too old") as caught:
        known_platforms.current({"GRAPHRT_PLATFORM": "off"})
    assert "doctor" in str(caught.value.advice)
    assert known_platforms.get("off", must_be_available=False).name == "off"


def test_two_available_out_of_tree_platforms_raise_a_conflict() -> None:
    known_platforms = registry(StubPlatform("one"), StubPlatform("two"))
    with pytest.raises(PlatformError) as caught:
        known_platforms.current({})
    message = str(caught.value)
    assert "'one' of plugin0" in message and "'two' of plugin1" in message
    assert "set GRAPHRT_PLATFORM=one" in message
    assert known_platforms.get("two").name == "two"


def test_two_platforms_with_the_same_name_conflict_even_if_unavailable() -> None:
    known_platforms = registry(
        StubPlatform("same", False), StubPlatform("same", False), StubPlatform("other")
    )
    for ask in (lambda: known_platforms.current({}), lambda: known_platforms.get("same")):
        with pytest.raises(PlatformError, match=r"plugin0 and .* plugin1"):
            ask()
    assert known_platforms.get("other").name == "other"
    assert known_platforms.current({"GRAPHRT_PLATFORM": "other"}).name == "other"
    assert len(known_platforms.platforms()) == 3


@pytest.mark.usefixtures("built_ins")
def test_a_plugin_may_not_use_the_name_of_a_built_in_platform() -> None:
    with pytest.raises(PlatformError, match=r"plugin0 and .* graphrt"):
        registry(StubPlatform("cpu"), built_ins=table("cpu")).current({})


def test_no_available_platform_raises_with_the_reason_of_each_platform() -> None:
    with pytest.raises(PlatformError, match="off: no such device"):
        registry(StubPlatform("off", False)).current({})
    with pytest.raises(PlatformError, match="none found"):
        registry().current({})


def test_a_platforms_availability_is_asked_only_once() -> None:
    stub = StubPlatform("one")
    known_platforms = registry(stub)
    assert known_platforms.current({}) is known_platforms.current({}) is stub
    assert stub.asked == 1


# Registering -------------------------------------------------------------------------------------


def test_two_registries_do_not_share_their_platforms() -> None:
    first, second = registry(StubPlatform("one")), registry()
    assert [each.name for each in first.platforms()] == ["one"]
    assert second.platforms() == ()


def test_a_plugin_registered_after_the_first_listing_is_found() -> None:
    known_platforms = registry()
    assert known_platforms.platforms() == ()
    plugin = Plugin(iter([StubPlatform("late"), StubPlatform("later", False)]))
    known_platforms.register(plugin)
    assert [each.name for each in known_platforms.platforms()] == ["late", "later"]
    assert known_platforms.current({}).name == "late" and plugin.calls == 1


def test_registering_a_plugin_or_a_plugin_name_twice_raises() -> None:
    known_platforms = registry(StubPlatform("one"))
    with pytest.raises(ValueError, match="plugin0"):
        known_platforms.register(Plugin(StubPlatform("two")), "plugin0")
    twice = Plugin(StubPlatform("two"))
    known_platforms.register(twice)
    with pytest.raises(ValueError, match="under a different name"):
        known_platforms.register(twice, "another")


def test_registering_a_module_without_a_graphrt_hook_raises() -> None:
    known_platforms = registry()
    with pytest.raises(PlatformError, match="no graphrt hook"):
        known_platforms.register(types.ModuleType("empty"))
    assert known_platforms.platforms() == ()


def test_registering_a_hook_of_the_wrong_signature_raises() -> None:
    class Wrong:
        @hookimpl
        def graphrt_platforms(self, config: object) -> None: ...

    with pytest.raises(pluggy.PluginValidationError, match="not be found in the hookspec"):
        registry().register(Wrong())


# Broken plugins ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "result", [RuntimeError("broken hook"), StubPlatform, [StubPlatform("ok"), 3], 3]
)
def test_a_plugin_whose_hook_fails_is_recorded_with_a_warning_and_skipped(result: object) -> None:
    known_platforms = registry(result, StubPlatform("good"))
    with pytest.warns(PluginWarning, match="plugin0"):
        listed = known_platforms.platforms()
    broken = next(each for each in listed if each.plugin == "plugin0")
    assert broken.error is not None and "Traceback" in broken.error
    assert not broken.availability.available and broken.availability.reason
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert known_platforms.current({}).name == "good"


def test_asking_for_an_unknown_platform_names_the_broken_plugin() -> None:
    known_platforms = registry(RuntimeError("broken hook"), StubPlatform("good"))
    with (
        pytest.warns(PluginWarning),
        pytest.raises(PlatformError, match="plugin0 is broken"),
    ):
        known_platforms.get("bad")


def test_a_platform_whose_availability_raises_is_recorded_with_a_warning() -> None:
    class Raises(StubPlatform):
        def availability(self) -> Availability:
            raise OSError("libdevice.so")

    known_platforms = registry(Raises("bad"), StubPlatform("good"))
    with pytest.warns(PluginWarning, match=r"libdevice\.so"):
        assert known_platforms.current({}).name == "good"
    bad = known_platforms.platforms()[0]
    assert bad.error is not None and "Traceback" in bad.error
    with pytest.raises(PlatformError, match=r"libdevice\.so"):
        known_platforms.get("bad")


def entry(name: str, value: str) -> EntryPoint:
    return EntryPoint(name=name, value=value, group="graphrt")


def test_a_broken_entry_point_does_not_stop_the_remaining_plugins_from_loading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module: Any = types.ModuleType("stub_plugin")
    module.plugin = Plugin(StubPlatform("mine"))
    monkeypatch.setitem(sys.modules, "stub_plugin", module)
    listed = [
        entry("broken", "no_such_module_at_all"),
        entry("empty", "collections"),
        entry("good", "stub_plugin:plugin"),
        entry("again", "stub_plugin:plugin"),
    ]
    scans: list[str] = []

    def scan(group: str) -> EntryPoints:
        scans.append(group)
        return EntryPoints(listed)

    monkeypatch.setattr(plugins, "entry_points", scan)
    known_platforms = PlatformRegistry({})
    assert scans == []
    with pytest.warns(PluginWarning, match="left out") as warned:
        known_platforms.platforms()
    with pytest.warns(PluginWarning, match="'mine' of plugin good is the default"):
        assert known_platforms.current({}).name == "mine"
    assert scans == ["graphrt"] and len(warned) == 2
    errors = {each.plugin: each.error for each in known_platforms.platforms()}
    assert errors["good"] is None
    assert "no_such_module_at_all" in str(errors["broken"])
    assert "no graphrt hook" in str(errors["empty"])


# The variable that names plugins ------------------------------------------------------------------


@pytest.fixture
def two_installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Plugins "one" (available) and "two" (not) are installed; the list is of those imported."""
    loaded: list[str] = []

    def load(self: EntryPoint) -> Any:
        loaded.append(self.name)
        return Plugin(StubPlatform(self.name, self.name == "one"))

    monkeypatch.setattr(EntryPoint, "load", load)
    listed = EntryPoints([entry("one", "stub_one"), entry("two", "stub_two")])
    monkeypatch.setattr(plugins, "entry_points", lambda group: listed)
    return loaded


@pytest.mark.usefixtures("built_ins")
@pytest.mark.parametrize(
    ("value", "imported"),
    [("off", []), (" off ", []), ("off,one", []), ("one", ["one"]), ("two, one", ["one", "two"]),
     ("two,", ["two"]), ("", ["one", "two"]), (" ", ["one", "two"])],
)  # fmt: skip
def test_graphrt_plugins_says_which_installed_plugins_are_imported(
    value: str, imported: list[str], two_installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHRT_PLUGINS", value)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if value.strip() else "ignore", PluginWarning)
        current = PlatformRegistry(table("cpu")).current()
    assert two_installed == imported
    assert current.name == ("one" if "one" in imported else "cpu")


def test_graphrt_plugins_warns_of_a_name_that_no_plugin_has(
    two_installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHRT_PLUGINS", "one,tow")
    with pytest.warns(PluginWarning, match="names 'tow', and no such plugin"):
        PlatformRegistry({}).platforms()
    assert two_installed == ["one"]


def test_a_plugin_that_becomes_the_default_unnamed_is_warned_of_once(
    two_installed: list[str],
) -> None:
    known_platforms = PlatformRegistry({})
    with pytest.warns(PluginWarning) as warned:
        assert [known_platforms.current({}).name for _ in range(3)] == ["one"] * 3
    (warning,) = warned
    text = str(warning.message)
    assert "'one' of plugin one is the default here: module stub_one. To keep" in text
    assert "GRAPHRT_PLATFORM=one" in text and "GRAPHRT_PLUGINS=off" in text
    assert warning.filename == __file__
    assert two_installed == ["one", "two"]


@pytest.mark.usefixtures("two_installed", "built_ins")
def test_a_platform_that_was_named_or_registered_gives_no_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", PluginWarning)
        known_platforms = PlatformRegistry({})
        assert known_platforms.current({"GRAPHRT_PLATFORM": "one"}).name == "one"
        assert known_platforms.current({}).name == "one"
        known_platforms = PlatformRegistry({})
        assert known_platforms.get("one") is known_platforms.current({})
        own = PlatformRegistry({}, group=None)
        own.register(Plugin(StubPlatform("mine")))
        assert own.current({}).name == "mine"


def test_a_platform_name_that_cannot_be_printed_is_refused() -> None:
    known_platforms = registry(StubPlatform("\x1b[2Jevil"), StubPlatform("good"))
    with pytest.warns(PluginWarning, match="the platform's name is no word"):
        assert known_platforms.current({}).name == "good"


def test_control_characters_of_a_broken_plugin_are_escaped() -> None:
    known_platforms = registry(RuntimeError("\x1b[2J\x9b1A"))
    with pytest.warns(PluginWarning, match=r"\\x1b\[2J\\x9b1A"):
        (broken,) = known_platforms.platforms()
    assert "\x1b" not in str(broken.error) and "\x1b" not in broken.availability.reason


# Built-ins ---------------------------------------------------------------------------------------


def test_built_in_platforms_whose_module_is_missing_are_left_out() -> None:
    missing = {"a": "no_such_package.platform:A", "b": "graphrt.no_such_part:B"}
    assert registry(built_ins=missing).platforms() == ()


def test_a_built_in_without_its_platform_class_is_recorded_with_a_warning(
    built_ins: types.ModuleType,
) -> None:
    del built_ins.Gpu
    known_platforms = registry(built_ins=table("gpu", "cpu"))
    with pytest.warns(PluginWarning, match="'gpu'"):
        assert known_platforms.current({}).name == "cpu"
    broken = known_platforms.platforms()[0]
    assert (broken.name, broken.platform) == ("gpu", None)
    assert "AttributeError" in str(broken.error)


def test_a_failing_import_inside_a_built_in_platform_gives_a_warning(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "half_there"
    package.mkdir()
    (package / "__init__.py").write_text("import a_library_that_is_missing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.warns(PluginWarning, match="a_library_that_is_missing"):
        (platform,) = registry(built_ins={"x": "half_there.platform:X"}).platforms()
    assert platform.name == "x"


def test_the_default_registry_lists_built_in_platforms_in_order_of_preference() -> None:
    assert list(plugins.BUILT_IN_PLATFORMS) == ["ascend", "cuda", "accelerator", "cpu"]
    assert all(path.startswith("graphrt.") for path in plugins.BUILT_IN_PLATFORMS.values())


# What hosts call ---------------------------------------------------------------------------------


def test_plugin_module_functions_use_the_default_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = registry()
    monkeypatch.setattr(plugins, "_default", mine)
    plugins.register(Plugin(StubPlatform("mine")), "p")
    assert plugins.current_platform().name == "mine"
    assert plugins.get_platform() is plugins.get_platform("mine")
    assert [each.name for each in plugins.installed_platforms()] == ["mine"]


def test_importing_the_registry_scans_no_entry_points_and_imports_no_platform() -> None:
    code = (
        "import importlib.metadata as m, sys\n"
        "scan = m.entry_points\n"
        "def refuse(**k):\n"
        "    assert k.get('group') != 'graphrt', 'scanned at import'\n"
        "    return scan(**k)\n"
        "m.entry_points = refuse\n"
        "import graphrt.core.device.registry\n"
        "platforms = ('cpu', 'cuda', 'ascend', 'accelerator')\n"
        "found = [n for n in sys.modules if n.split('.')[:2] in"
        " [['graphrt', each] for each in platforms]]\n"
        "assert not found and 'torch_npu' not in sys.modules, found\n"
    )
    starts.run("-c", code, check=True)


# Plugins that end the process ---------------------------------------------------------------------


@pytest.fixture
def raising_entry_point(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets the only installed plugin be a module that raises what it is given when imported."""

    def install(error: BaseException) -> PlatformRegistry:
        def load(self: EntryPoint) -> Any:
            raise error

        point = EntryPoint("ender", "ender:plugin", plugins.ENTRY_POINT_GROUP)
        monkeypatch.setattr(EntryPoint, "load", load)
        monkeypatch.setattr(plugins, "entry_points", lambda group: EntryPoints([point]))
        return PlatformRegistry({})

    return install


def test_a_plugin_that_raises_systemexit_on_import_is_left_out(raising_entry_point: Any) -> None:
    known_platforms = raising_entry_point(SystemExit("no driver"))
    with pytest.warns(PluginWarning, match=r"no driver.*GRAPHRT_PLUGINS=off"):
        (broken,) = known_platforms.platforms()
    assert broken.platform is None and "SystemExit" in broken.error


def test_a_plugin_whose_hook_or_availability_raises_systemexit_is_left_out() -> None:
    class Exits(Plugin):
        @hookimpl
        def graphrt_platforms(self) -> Any:
            raise SystemExit(1)

    class Stops(StubPlatform):
        def availability(self) -> Availability:
            raise SystemExit(1)

    known_platforms = registry(Stops("stops"), StubPlatform("cpu"))
    known_platforms.register(Exits(None), "exits")
    with pytest.warns(PluginWarning) as warned:
        assert known_platforms.current().name == "cpu"
    assert len(warned) == 2


def test_a_built_in_platform_that_raises_systemexit_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module: Any = types.ModuleType("stub_exits")
    module.__spec__ = importlib_spec("stub_exits")

    def exits() -> Any:
        raise SystemExit(3)

    module.Gpu = exits
    monkeypatch.setitem(sys.modules, "stub_exits", module)
    with pytest.warns(PluginWarning, match="SystemExit"):
        (broken,) = PlatformRegistry({"gpu": "stub_exits:Gpu"}, group=None).platforms()
    assert broken.name == "gpu" and broken.platform is None


def test_a_keyboard_interrupt_during_plugin_discovery_is_raised(raising_entry_point: Any) -> None:
    known_platforms = raising_entry_point(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        known_platforms.platforms()

    class Interrupts(StubPlatform):
        def availability(self) -> Availability:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        registry(Interrupts("stops")).current()


@pytest.mark.usefixtures("built_ins")
@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["import", "hook", "generator", "availability", "start"])
def test_a_plugin_that_fails_takes_along_what_it_registered(
    where: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it fails; what others have registered stays."""
    known = PlatformRegistry(table("cpu"))

    def fail() -> Any:
        known.register(Plugin(StubPlatform("hidden")), "hidden")
        raise error("no device")

    class Fails(Plugin):
        @hookimpl
        def graphrt_platforms(self) -> Any:
            return fail() if where == "hook" else iter(fail, 0) if where == "generator" else asked

    asked = StubPlatform("asked")
    if where in ("availability", "start"):
        monkeypatch.setattr(asked, where, fail)
    load = fail if where == "import" else lambda: Fails(None)
    monkeypatch.setattr(EntryPoint, "load", lambda self: load())
    listed = EntryPoints([entry("failing", "failing")])
    monkeypatch.setattr(plugins, "entry_points", lambda group: listed)
    known.register(Plugin(StubPlatform("other", available=False)), "other")
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PluginWarning)
            is_raised = error is KeyboardInterrupt or where == "start"
            raised = error if error is KeyboardInterrupt else PlatformError
            with pytest.raises(raised) if is_raised else nullcontext():
                assert known.current({}).name == "cpu"
    names = {name for name, _ in known._plugins.list_name_plugin()}
    assert "other" in names and "hidden" not in names


# Plugins that are wrong --------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [True, None, "yes", ("no", 3)], ids=repr)
def test_an_availability_of_wrong_type_is_recorded_with_a_warning(answer: Any) -> None:
    wrong = StubPlatform("wrong")
    wrong._answer = answer
    known_platforms = registry(wrong, StubPlatform("good"))
    with pytest.warns(PluginWarning, match="'wrong' of plugin0 failed availability"):
        assert known_platforms.current({}).name == "good"
    with pytest.raises(PlatformError, match="available"):
        known_platforms.get("wrong")


@pytest.mark.parametrize("name", [7, None, b"npu"], ids=repr)
def test_a_platform_whose_name_is_no_string_is_recorded_and_skipped(name: Any) -> None:
    known_platforms = registry(StubPlatform(name), StubPlatform("good"))
    with pytest.warns(PluginWarning, match="'name' has a wrong type"):
        assert known_platforms.current({}).name == "good"


class Mute(Exception):
    """Prints as nothing: its text and its notes raise."""

    def __str__(self) -> str:
        raise ValueError

    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]
        raise RuntimeError


def _raises(self: object) -> Any:
    raise Mute


MISSHAPEN: dict[str, dict[str, Any]] = {
    "an empty name": {"name": ""},
    "a name that no variable can hold": {"name": " mine "},
    "a name that raises": {"name": property(_raises, lambda self, value: None)},
    "a device type that is none": {"device_type": None},
    "a device type that raises": {"device_type": property(_raises)},
    "a choice that raises": {"by_name_only": property(_raises)},
    "a choice that is no flag": {"by_name_only": "no"},
    "an availability that cannot be printed": {"availability": _raises},
}


@pytest.mark.parametrize("how", MISSHAPEN)
def test_a_platform_of_misshapen_attributes_is_left_out_with_a_warning(how: str) -> None:
    bad: Any = type("Bad", (StubPlatform,), MISSHAPEN[how])("bad")
    if how.endswith(("empty name", "can hold")):
        bad.name = MISSHAPEN[how]["name"]
    known_platforms = registry(bad, StubPlatform("good"))
    with pytest.warns(PluginWarning, match="is left out"):
        assert known_platforms.current({}).name == "good"


@pytest.mark.parametrize(
    "value", [{"capture"}, 3, property(_raises)], ids=["set", "int", "property"]
)
def test_capabilities_that_are_none_are_refused_when_the_platform_starts(value: Any) -> None:
    """Of words instead, every step would run eagerly, and nothing would say why."""
    bad: Any = type("Bad", (StubPlatform,), {"capabilities": value})("bad")
    known_platforms = registry(bad)
    with pytest.raises(PlatformError, match="capabilities"):
        known_platforms.current({})
    with pytest.raises(PlatformError, match="capabilities"):
        known_platforms.get("bad")


@pytest.mark.parametrize("call", ["hook", "availability", "start"])
def test_an_error_whose_text_raises_names_the_plugin(call: str) -> None:
    class Bad(StubPlatform):
        def availability(self) -> Availability:
            return Availability(True) if call == "start" else _raises(self)

        def start(self) -> None:
            _raises(self)

    known_platforms = registry(Mute() if call == "hook" else Bad("bad"))
    if call == "start":
        with pytest.raises(PlatformError, match="Mute: its __str__"):
            known_platforms.get("bad")
        return
    with pytest.warns(PluginWarning, match="plugin0.*Mute: its __str__"):
        assert not known_platforms.platforms()[0].availability.available
    assert known_platforms.platforms()[0].error


def test_an_interrupted_start_names_the_plugin(caplog: pytest.LogCaptureFixture) -> None:
    class Hangs(StubPlatform):
        def start(self) -> None:
            raise KeyboardInterrupt

    for call in (lambda each: each.current({}), lambda each: each.get("slow")):
        caplog.clear()
        with pytest.raises(KeyboardInterrupt):
            call(registry(Hangs("slow")))
        assert "interrupted in plugin plugin0" in caplog.text


def test_a_plugin_that_gives_no_end_of_things_is_left_out() -> None:
    def endless() -> Iterator[int]:
        while True:
            yield 3

    with pytest.warns(PluginWarning, match="no platform"):
        assert registry(endless(), StubPlatform("good")).current({}).name == "good"


@pytest.mark.usefixtures("built_ins")
@pytest.mark.parametrize("forced", [{"GRAPHRT_PLATFORM": "cpu"}, None], ids=["forced", "by name"])
def test_asking_for_a_built_in_by_name_imports_no_plugin(
    monkeypatch: pytest.MonkeyPatch, forced: dict[str, str] | None
) -> None:
    loaded: list[str] = []

    def load(self: EntryPoint) -> Any:
        loaded.append(self.name)
        raise ImportError("hangs")

    monkeypatch.setattr(EntryPoint, "load", load)
    monkeypatch.setattr(plugins, "entry_points", lambda group: EntryPoints([entry("a", "b")]))
    known_platforms = PlatformRegistry(table("gpu", "cpu"))
    platform = known_platforms.get("cpu") if forced is None else known_platforms.current(forced)
    assert (platform.name, loaded) == ("cpu", [])
    with pytest.warns(PluginWarning, match="hangs"):
        assert known_platforms.current({}).name == "gpu"
    assert loaded == ["a"] and known_platforms.get("cpu") is platform


def test_importing_graphrt_never_raises_for_nonsense_environment_variables() -> None:
    read = ["LOG", "MODE", "CHECK", "PLATFORM", "VLLM"]
    read += ["VLLM_ASCEND", "ASCEND_UPDATE_ORDER", "ASCEND_HANG_TIMEOUT_S", "NATIVE"]
    read += ["CACHE_DIR", "DISABLE_CACHE", "CACHE_FORMAT"]
    code = "import graphrt, graphrt.platforms, graphrt.errors"
    nonsense = {f"GRAPHRT_{name}": "!nonsense" for name in read}
    done = starts.run("-c", code, env={**os.environ, **nonsense})
    assert done.returncode == 0, done.stderr
    assert "GRAPHRT_LOG" in done.stderr and "DEBUG, INFO, WARNING, ERROR" in done.stderr
