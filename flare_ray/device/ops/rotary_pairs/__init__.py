"""Rotary positions on adjacent pairs of trailing channels."""
