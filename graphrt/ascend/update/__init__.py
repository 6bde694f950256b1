"""New host arguments for the tasks of a graph, given on another stream while the graph runs."""
