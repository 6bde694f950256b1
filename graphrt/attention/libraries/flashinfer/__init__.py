"""Attention by FlashInfer: its wrappers are planned on the host, over lists of pages."""
