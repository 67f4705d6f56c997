"""Protobuf to columns (steps) and records (requests)."""
