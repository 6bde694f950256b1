"""Decode attention by itself: its kernels, their tiles, their updates."""
