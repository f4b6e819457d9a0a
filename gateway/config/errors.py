"""The error that an invalid configuration raises."""


class ConfigError(Exception):
    """The configuration is invalid; the message has one line per fault and can be printed as it is."""
