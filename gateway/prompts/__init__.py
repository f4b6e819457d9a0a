"""Canonical prompts and registered prompt versions."""
