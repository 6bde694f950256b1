"""Task arguments that a graph segment hands to its platform at each replay."""

from __future__ import annotations

from typing import Any

from graphrt import HostArg, UpdatableTask
from graphrt.core.replay.entry import Segment
from graphrt.core.replay.tasks import CapturedTask


class Listening:
    def __init__(self) -> None:
        self.told: list[tuple[bool, list[Any]]] = []
        self.fail = False

    def replay_updated(self, graph, updates, *, changed, name=""):
        if self.fail:
            raise RuntimeError("in the update")
        self.told.append((changed, [dict(update.values) for update in updates]))


def segment(platform: Listening) -> Segment:
    spec = UpdatableTask("attention", lambda **_: None, {"length": HostArg(None)})
    tasks = [CapturedTask(spec, f"layers.{i}", None, (), {}, {"length": 0}) for i in range(2)]
    return Segment(platform, None, tasks)  # type: ignore[arg-type]


def test_a_segment_replay_without_changes_repeats_the_last_task_arguments():
    platform = Listening()
    replayed = segment(platform)
    replayed.replay()
    replayed.replay_with([{"length": 3}, {"length": 4}])
    replayed.replay()
    old, new = [{"length": 0}] * 2, [{"length": 3}, {"length": 4}]
    assert platform.told == [(False, old), (True, new), (False, new)]


def test_a_failed_segment_update_keeps_the_previous_task_arguments():
    platform = Listening()
    replayed = segment(platform)
    platform.fail = True
    try:
        replayed.replay_with([{"length": 3}, {"length": 4}])
    except RuntimeError:
        platform.fail = False
    replayed.replay()
    assert [task.values for task in replayed.tasks] == [{"length": 0}] * 2
    assert platform.told == [(False, [{"length": 0}] * 2)]
