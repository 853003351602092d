"""Decisions over the engines of one application: which one takes a request, how many there are."""
