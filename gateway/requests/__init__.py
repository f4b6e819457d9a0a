"""One request: its record, the registry of those in flight, its time limit, the checks of its answer."""
