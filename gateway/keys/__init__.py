"""Who calls and how much: keys, roles, rate limits."""
