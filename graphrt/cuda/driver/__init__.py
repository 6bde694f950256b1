"""Calls of the CUDA driver for which torch has no function: captures, graphs and their nodes.

A *template* is a captured CUgraph, an *executable* the CUgraphExec that is launched.
"""
