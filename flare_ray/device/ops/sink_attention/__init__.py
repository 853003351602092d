"""Attention over two lists of rows with a learned sink."""
