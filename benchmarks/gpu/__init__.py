"""Benchmarks that need a GPU to say anything."""
