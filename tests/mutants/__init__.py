"""Mutants of core: a line changed, and the tests have to notice."""
