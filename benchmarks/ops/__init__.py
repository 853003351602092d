"""Operators of a round at the released geometry, each against the bytes that it must move."""
