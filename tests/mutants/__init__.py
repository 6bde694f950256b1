"""Mutants of core and of the Ascend platform: a line changed, and the tests have to notice."""
