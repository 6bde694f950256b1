"""The tape of a capture: what is recorded, how it is made cheap, and the code that replays it."""
