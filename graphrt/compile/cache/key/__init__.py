"""The key of compiled code: everything that it depends on, from one list (`parts`)."""
