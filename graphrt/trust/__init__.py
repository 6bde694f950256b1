"""Whether a graph still stands for its forward: watching warm-ups, trying graphs, checks."""
