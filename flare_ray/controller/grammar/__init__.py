"""Constraint seams: the matcher protocol, and the bytes of every token that stops and grammars
read."""
