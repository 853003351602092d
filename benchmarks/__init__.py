"""Measurements: each module writes one file under ``benchmarks/results``, its command in it."""
