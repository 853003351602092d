"""Where the few rows of a round's pass read and write paged state."""
