"""Residual streams around a block, mixed by gates of low rank."""
