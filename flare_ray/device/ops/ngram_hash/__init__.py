"""Table rows of the n-grams that end at each token."""
