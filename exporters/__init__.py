"""Publishes immutable snapshots: Prometheus, files, HTTP, the status page."""
