"""The journey's line "generate": attempts, resume, fallback and the output guard around one backend call."""
