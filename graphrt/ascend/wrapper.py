"""The graph wrapper of Ascend NPUs."""

from __future__ import annotations

from graphrt.core.capture.wrapper import GraphWrapper


class ACLGraphWrapper(GraphWrapper):
    """A `GraphWrapper` whose graphs are ACL graphs."""

    platform_name = "ascend"
