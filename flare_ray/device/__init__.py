"""Executes rounds on one rank. Imports neither ray nor the controller."""
