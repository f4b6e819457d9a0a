"""The journey's stage "generate": attempts, resume, fallback and the output guard around a backend call."""
