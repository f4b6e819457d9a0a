"""``sluice chaos``: breaks things on purpose while callers are served, and tells what they got."""
