"""A prototype: graphs written to a file by one process, and built from it by another one.

A pointer is kept as the name of a memory and an offset in it, a kernel as its name. Limits: greedy
forwards without random numbers, one device, kernels, copies and fills as nodes, files that are
whole. `docs/development/saved_graphs.md` has what it showed.
"""
