"""Which rows an expert's block of a grouped product reads."""
