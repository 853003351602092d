"""What benchmarks share: the result file and its table."""
