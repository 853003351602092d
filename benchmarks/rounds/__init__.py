"""Captured rounds at the released geometry, on random weights (contract: B5)."""
