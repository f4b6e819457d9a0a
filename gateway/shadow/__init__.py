"""Shadow traffic: a sample of requests asked again of another backend, and how the answers compare."""
