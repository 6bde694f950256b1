"""What is captured: mode, sizes and budget, as one plan."""
