"""Learns, and nothing else: no I/O, no thread, no clock, no logging, nothing of ours imported."""
