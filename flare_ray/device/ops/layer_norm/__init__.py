"""Layer norm over the last dimension."""
