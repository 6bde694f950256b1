"""Random programs: each is grown from a seed, run with graphs, and compared with its eager twin."""
