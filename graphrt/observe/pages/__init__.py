"""One page of a run, or of two: HTML that needs no network, no script and no other file."""
