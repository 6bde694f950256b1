"""`GraphRunner`: all of it for one forward."""
