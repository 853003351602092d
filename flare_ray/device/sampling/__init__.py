"""Distributions and draws: Philox uniforms, filters, chain verification, token masks.

Pure functions over static shapes; every TP rank calls them on the same gathered logits with the
same streams, so all ranks emit equal tokens (contract: S6).
"""
