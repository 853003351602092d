"""Metric names, recording and export; every series is declared once in names.py."""
