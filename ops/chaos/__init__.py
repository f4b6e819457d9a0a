"""``sluice chaos``: injects faults under load, and reports the outcome of every request."""
