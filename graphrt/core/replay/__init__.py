"""What one captured step is, and how it is replayed in its pool."""
