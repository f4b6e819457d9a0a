"""What is wrong with the configuration, ready to print."""

from __future__ import annotations


class ConfigError(Exception):
    """The configuration cannot be used; the message is one line per fault, ready to print."""
