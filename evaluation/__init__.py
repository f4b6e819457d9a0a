"""Offline evaluation of models, adapters and policies."""
