"""Anthropic's Messages contract."""
