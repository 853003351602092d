"""The matrix of sampling features: what a cell asks for, what it must answer, and how it is run.

A micro vocabulary whose texts can be read back token by token, a random table of second order as
target, the whole service in one process: HTTP validation, controller, round, stops, streams.
"""
