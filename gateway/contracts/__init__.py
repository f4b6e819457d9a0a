"""The public contracts, as pydantic models at the edge, and the internal values."""
