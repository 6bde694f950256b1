"""A small continuous-batching engine on graphrt that proves replay equal to eager as it runs."""

from graphrt.demo.app import run_demo

__all__ = ["run_demo"]
