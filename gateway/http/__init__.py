"""HTTP and WebSocket: paths, sinks and middleware."""
