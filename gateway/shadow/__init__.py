"""Shadow traffic: a sample of requests is sent to another backend too, and the answers are compared."""
