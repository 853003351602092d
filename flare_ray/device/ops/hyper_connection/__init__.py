"""Several residual streams, mixed by a doubly stochastic matrix before and after each block."""
