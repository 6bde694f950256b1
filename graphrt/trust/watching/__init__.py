"""What a run of a forward does with memory from outside."""
