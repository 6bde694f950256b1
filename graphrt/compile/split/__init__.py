"""Splitting: opaque operators, cutting a traced graph at them, and which pieces are the same."""
