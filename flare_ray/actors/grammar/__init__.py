"""Grammars on the engine's side: compiled by a process of their own, matched in the engine's.

`service` is what the controller is given; `worker` the compiling process; `xgrammar` the library's
adapter; `structure` how a whole output is described to it.
"""
