"""The conformance tests, a module for each part of the contract, and one class that has all."""

from graphrt.testing.conformance.base import D2, D4, FULL, PIECEWISE, ConformanceBase, Counting
from graphrt.testing.conformance.suite import PlatformConformance

__all__ = ["D2", "D4", "FULL", "PIECEWISE", "ConformanceBase", "Counting", "PlatformConformance"]
