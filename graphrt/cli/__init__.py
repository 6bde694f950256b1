"""The `graphrt` command; needs the extra `cli`."""
