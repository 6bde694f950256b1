"""What the Python side of a forward holds: its tensors, its plain values, and the way to them."""
