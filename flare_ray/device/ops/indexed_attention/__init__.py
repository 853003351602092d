"""Attention of absorbed queries over latent rows that serve as key and value."""
