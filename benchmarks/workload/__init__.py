"""What speculation is worth on the demo checkpoint: the frozen workload, baselines and peers."""
