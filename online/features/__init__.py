"""Feature sets: tables of (name, unit, formula), evaluated per step and summed per row."""
