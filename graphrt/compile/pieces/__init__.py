"""Pieces: each compiled once, wrapped for capture, and stitched into one call."""
