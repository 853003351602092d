"""What exact sampling and constraints cost."""
