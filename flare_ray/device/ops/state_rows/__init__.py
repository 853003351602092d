"""Rows of state tensors, read and written at flat indices that the device computes."""
