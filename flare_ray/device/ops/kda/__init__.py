"""Kimi delta attention: a delta rule whose state decays per channel."""
