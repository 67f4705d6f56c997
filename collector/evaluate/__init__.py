"""``tracefit evaluate``: every system, side by side, on any recordings."""
