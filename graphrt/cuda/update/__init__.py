"""New host arguments for the tasks of captured graphs, given to their executables."""
