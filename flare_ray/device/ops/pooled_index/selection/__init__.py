"""The best pools of a row, by a search over the bits of their scores."""
