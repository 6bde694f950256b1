"""100,000 random steps in one process, by graphs and beside a twin without: what must stay equal,
and what must stay level."""
