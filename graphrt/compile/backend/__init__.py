"""Backends: what turns one piece into something to call, and loads what it made before."""
