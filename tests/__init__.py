"""A package, so that tests find each other's models however they are started."""
