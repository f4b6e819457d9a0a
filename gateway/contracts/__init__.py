"""The public contracts (pydantic, at the edge) and the values that travel inside."""
