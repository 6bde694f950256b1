"""The version of graphrt, where everything in it can read it."""

__version__ = "0.1.0"
