"""Drafts that are copied from text instead of being drawn by a drafter (contract: H1, H3)."""
