"""Attention of requests with any number of tokens, by PyTorch's operators on tiles of queries."""
