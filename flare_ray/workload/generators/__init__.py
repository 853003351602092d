"""Seeded generators of conversations and recorded tool use; training and workload share them."""
