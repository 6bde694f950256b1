"""The conformance tests, a module for each part of the contract, and one class that has all."""
