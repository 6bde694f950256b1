"""New host arguments for the tasks of captured graphs, written to their kernels."""
