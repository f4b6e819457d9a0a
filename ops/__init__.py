"""What operators run beside the gateway; no serving module imports it."""
