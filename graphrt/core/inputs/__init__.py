"""Static inputs, filled and padded at every step, and the live rows of outputs."""
