"""A recipe without weights: a table for a target, a script for a drafter, state of every kind.

The target's answer depends on its whole history through pages, a column, a window, a ring and a
row, which are compared with one another at every row: one stale or foreign entry selects another
row of the table. The engine loads it like any family, by `tests.support.scripted.recipe:RECIPE`.
"""
