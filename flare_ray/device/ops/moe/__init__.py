"""Routed experts: gate-up product, bounded SwiGLU, down product, weighted sum."""
