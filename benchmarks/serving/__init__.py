"""Figures of the complete service: ``first_light`` (speed, memory, start) and ``soak`` (leaks)."""
