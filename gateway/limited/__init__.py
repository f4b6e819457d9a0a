"""Runs work with resource limits, in processes that are killed if they exceed them."""
