"""The levels that attention backends of engines declare, as data, and how to look one up."""
