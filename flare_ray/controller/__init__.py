"""Decides: admission, cohorts, widths, pages, stops, publication. Imports neither torch nor ray."""
