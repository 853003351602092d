"""What exact sampling costs: acceptance of the reproducible mode."""
