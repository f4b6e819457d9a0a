"""Files of callers, and batches of requests that run on idle capacity."""
