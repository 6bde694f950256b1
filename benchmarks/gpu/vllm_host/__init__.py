"""vLLM's own graphs against graphrt's: the same tokens, and what steps and captures cost."""
