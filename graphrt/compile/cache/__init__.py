"""The compile cache: compiled pieces on disk, under a key of all that they depend on."""
