"""Receives, decodes, joins; owns the process, the threads and the clock."""
