"""The device contract, the platforms that fulfil it, and the memory of their graphs."""
