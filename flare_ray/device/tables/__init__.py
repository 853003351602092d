"""Lookup tables too large to be held by every rank (contract: M8)."""
