"""Softmax and nucleus over whole vocabularies as kernels."""
