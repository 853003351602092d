"""Rows of a table that does not lie where programs compute."""
