"""``sluice chaos``: injects faults while callers are served, and reports every answer."""
