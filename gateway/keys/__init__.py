"""API keys, roles and rate limits."""
