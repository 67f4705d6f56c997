"""Publishes immutable snapshots: Prometheus, files, HTTP."""
