"""The update of tasks around a replay, in flight."""
