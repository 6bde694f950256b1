"""What a step is: modes, descriptors, batch axes, the context."""
