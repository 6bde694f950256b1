"""Which captured graph serves a batch."""
