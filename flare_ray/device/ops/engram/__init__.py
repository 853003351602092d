"""Rows of hashed n-gram tables, and their gated addition to the residual streams."""
