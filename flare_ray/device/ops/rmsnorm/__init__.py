"""Root-mean-square normalisation over the last dimension."""
