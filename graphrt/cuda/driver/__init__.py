"""The CUDA driver: what it knows of captures, templates and their nodes, and torch does not ask."""
