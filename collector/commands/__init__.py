"""What `tracefit X` does."""
