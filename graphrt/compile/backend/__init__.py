"""Backends: they compile one piece, or load its code."""
