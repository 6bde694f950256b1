"""How a runner runs one step: padded or not, checked or not."""
