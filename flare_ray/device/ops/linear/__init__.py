"""x @ weight.T with a constant weight."""
