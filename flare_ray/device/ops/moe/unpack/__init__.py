"""Packed experts on CPU: the chosen ones are unpacked into panels for a call."""
