"""Tracing: one Dynamo trace of a forward, what it relies on, and how its graph is called."""
