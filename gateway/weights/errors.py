"""The errors of fetching a model; each message is one line with the action to take."""


class FetchError(Exception):
    """A model's files could not be fetched."""


class UnknownLocation(FetchError):
    """The address is not a folder, hub id or S3 prefix."""


class NotThere(FetchError):
    """The source has no such bucket, prefix, key, model or revision."""


class Unreachable(FetchError):
    """The source does not answer, or the connection broke repeatedly."""


class FetchStopped(FetchError):
    """The fetch was stopped; received bytes are kept for the next one."""
