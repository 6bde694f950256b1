"""How a step is captured: segments, eager breaks, state, the wrapper."""
