"""Models that the tests of several folders run: import the module that has the one you need."""
