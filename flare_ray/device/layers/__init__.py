"""Blocks that several recipes may use: weights in run-time layout and the operators over them.

A block returns this rank's partial sum; whoever calls it reduces over ranks. Where rows read and
write state is computed once per pass (`rows`) and shared by all layers.
"""
