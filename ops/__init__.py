"""Operators' tools; no serving module imports them."""
