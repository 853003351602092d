"""Attention of query heads that share key and value heads, over cached rows."""
