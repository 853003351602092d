"""What speculation is worth: a frozen workload, arms in pairs, and the report on them."""
