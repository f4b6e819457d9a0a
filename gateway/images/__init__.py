"""Images of requests: read, checked and fetched before a backend gets them."""
