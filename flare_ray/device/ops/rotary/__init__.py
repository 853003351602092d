"""Rotary positions of the first channels of a head."""
