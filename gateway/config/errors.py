"""The error of a wrong configuration."""

from __future__ import annotations


class ConfigError(Exception):
    """The configuration cannot be used; the message is one line per fault, ready to print."""
