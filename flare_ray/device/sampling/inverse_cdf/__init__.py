"""Draws and chain verification over whole vocabularies as kernels."""
