"""Operators, one folder each: `api` (typed, shapes checked), `reference` (torch, any device), and a
file per kernel library where one is faster.

Operators know nothing of models, slots or rounds: where rows are read and written is handed in as
flat indices. All of them run under `torch.inference_mode()`, sync nothing and take every shape
from host-known sizes, so that a captured program can hold them.
"""
