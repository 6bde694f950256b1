"""Static inputs, filled and padded at every step, and the batch axes of outputs."""
