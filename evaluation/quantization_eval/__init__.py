"""Compares a quantized variant of a model with the model itself, and says whether it may take its place."""
