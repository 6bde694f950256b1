"""Errors that name the ranks at fault."""

from __future__ import annotations

from graphrt.core.base.errors import GraphRTError


class RankLostError(GraphRTError):
    """A rank is dead, stopped or late: it has not voted within the time-out."""


class RanksDifferError(GraphRTError):
    """Ranks have other plans, graphs, options or versions, or are at other steps."""


class RankStoppedError(GraphRTError):
    """A rank has said that it makes no more steps, and why."""
