"""The fleet: states of many sidecars, gathered, merged by configuration, and compared."""
