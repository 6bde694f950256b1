"""Faults: the n-th device action of each kind fails, for every n, and nothing stays half-done."""
