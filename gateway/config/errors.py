"""The error of a wrong configuration."""


class ConfigError(Exception):
    """The configuration cannot be used; the message is one line per fault, ready to print."""
