"""Errors that name the ranks at fault."""

from __future__ import annotations

from graphrt.core.base.errors import GraphRTError
from graphrt.core.base.homes import public


@public("graphrt.ranks")
class RankLostError(GraphRTError):
    """A rank is dead, stopped or late: it has not voted within the time-out."""


@public("graphrt.ranks")
class RanksDifferError(GraphRTError):
    """Ranks have other plans, graphs, options or versions, or are at other steps."""


@public("graphrt.ranks")
class RankStoppedError(GraphRTError):
    """A rank has said that it makes no more steps, and why."""
