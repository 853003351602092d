"""The random stream as a kernel."""
