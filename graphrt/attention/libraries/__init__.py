"""Backends over attention libraries, each imported when its first backend is made."""
