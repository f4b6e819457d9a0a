"""Maps errors of AWS and of its SDK to the closed set of failures; does not import the SDK.

Messages contain AWS's error code, never its text, which may have parts of the prompt or an account number.
"""

import re
from collections.abc import Mapping
from typing import Any

from resilience.failures import FailureKind


def names_of(error: BaseException) -> tuple[str, ...]:
    """``<package>.<class>`` of the error's class and of each of its ancestors, the class first.

    The package is the first part of the module: a library may move a class, but keeps the class's name.
    """
    return tuple(f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for cls in type(error).__mro__)


# Error codes of Bedrock and of the signature check. In streams they begin with a small letter.
_CODES: Mapping[str, FailureKind] = {
    "ThrottlingException": FailureKind.THROTTLED,
    "Throttling": FailureKind.THROTTLED,  # of STS, with status 400
    "TooManyRequestsException": FailureKind.THROTTLED,
    "ServiceQuotaExceededException": FailureKind.THROTTLED,
    "ModelTimeoutException": FailureKind.TIMEOUT,
    "ModelNotReadyException": FailureKind.BACKEND_UNAVAILABLE,
    "ModelErrorException": FailureKind.BACKEND_UNAVAILABLE,
    "ModelStreamErrorException": FailureKind.STREAM_BROKEN,
    "InternalServerException": FailureKind.BACKEND_UNAVAILABLE,
    "ServiceUnavailableException": FailureKind.BACKEND_UNAVAILABLE,
    "ResourceNotFoundException": FailureKind.MODEL_NOT_FOUND,
    "AccessDeniedException": FailureKind.ACCESS_DENIED,
    "UnrecognizedClientException": FailureKind.ACCESS_DENIED,
    "InvalidSignatureException": FailureKind.ACCESS_DENIED,
    "InvalidIdentityToken": FailureKind.ACCESS_DENIED,  # of STS, to a role's web identity
    "ExpiredTokenException": FailureKind.ACCESS_DENIED,
    "IDPCommunicationError": FailureKind.BACKEND_UNAVAILABLE,  # of STS, with status 400
}

# Parts of a ValidationException's text (lower case here), which alone shows the cause.
_TOO_LONG = (
    "input is too long",
    "prompt is too long",
    "too many input tokens",
    "input tokens exceeded",
    "context length",
    "context window",
    "context limit",
)
_NO_ACCESS = "operation not allowed"  # the account may not use the model
# Only the configuration has a guardrail, so none of a request is at fault.
_GUARDRAIL = ("guardrail identifier", "guardrailidentifier", "guardrail version", "guardrailversion")
# Words of its text that may be shown: they are the contract's, so none is a secret of the prompt.
_SUBJECTS = re.compile(
    r"image|document|video|tool|schema|temperature|top_p|max_tokens|stop_?sequence|prefill|guardrail|cache"
)
_NO_MODEL = ("model identifier is invalid", "on-demand throughput isn")

_CREDENTIALS = frozenset(
    {
        "botocore.NoCredentialsError",
        "botocore.PartialCredentialsError",
        "botocore.CredentialRetrievalError",
        "botocore.UnknownCredentialError",
        "botocore.NoAuthTokenError",
        "botocore.TokenRetrievalError",
        "botocore.ProfileNotFound",
        "botocore.ConfigNotFound",
        "botocore.ConfigParseError",
        "botocore.InvalidConfigError",
        "botocore.SSOError",
        "botocore.LoginError",
        "botocore.MetadataRetrievalError",
        "botocore.RefreshWithMFAUnsupportedError",
    }
)
_TIMEOUT = frozenset({"botocore.ReadTimeoutError", "urllib3.ReadTimeoutError"})
_NO_CONNECTION = frozenset(
    {
        "botocore.EndpointConnectionError",
        "botocore.ConnectTimeoutError",
        "botocore.SSLError",
        "botocore.ProxyConnectionError",
    }
)
_BROKEN = frozenset({"botocore.HTTPClientError", "urllib3.HTTPError"})
# An event stream that cannot be read: a wrong checksum, a malformed frame.
_UNREADABLE = frozenset({"botocore.ParserError", "botocore.IncompleteReadError", "botocore.ChecksumError"})


def aws_failure(error: Exception, *, delivered: bool) -> tuple[FailureKind, str] | None:
    """The failure that ``error`` means, and a text for the operator; ``None`` if it does not come from AWS.

    ``delivered``: a part of the answer had arrived, so a connection that breaks means a broken stream.
    """
    names = names_of(error)
    name = type(error).__name__
    known = frozenset(names)
    if "botocore.ClientError" in known:  # an answer, in a stream too
        response = getattr(error, "response", None)
        return _of_answer(response if isinstance(response, Mapping) else {})
    if known & _TIMEOUT:
        return FailureKind.TIMEOUT, "nothing came within read_timeout_seconds"
    if known & _CREDENTIALS:
        return FailureKind.ACCESS_DENIED, f"no usable credentials ({name})"
    if known & _NO_CONNECTION:
        return FailureKind.BACKEND_UNAVAILABLE, f"no connection ({name})"
    if known & _UNREADABLE:
        return FailureKind.STREAM_BROKEN, f"the answer cannot be read ({name})"
    if known & _BROKEN:
        kind = FailureKind.STREAM_BROKEN if delivered else FailureKind.BACKEND_UNAVAILABLE
        return kind, f"the connection broke ({name})"
    if "botocore.BotoCoreError" in known:
        return FailureKind.INTERNAL, f"boto3 refused the call ({name})"
    return None


def kind_of_status(status: int) -> FailureKind:
    """The failure that an HTTP status means when nothing else is known about the answer."""
    if status == 429:
        return FailureKind.THROTTLED
    if status in (408, 504):
        return FailureKind.TIMEOUT
    if status == 404:
        return FailureKind.MODEL_NOT_FOUND
    if status in (401, 403):
        return FailureKind.ACCESS_DENIED
    return FailureKind.BACKEND_UNAVAILABLE if status >= 500 else FailureKind.INTERNAL


def _of_answer(response: Mapping[str, Any]) -> tuple[FailureKind, str]:
    error = response.get("Error", {})
    code = str(error.get("Code", ""))
    code = code[:1].upper() + code[1:]
    if code == "ValidationException":
        text = str(error.get("Message", "")).lower()
        if any(sign in text for sign in _TOO_LONG):
            return FailureKind.TOKEN_LIMIT_EXCEEDED, "the prompt is longer than the model takes"
        if _NO_ACCESS in text:
            return FailureKind.ACCESS_DENIED, f"access denied ({code}): see `sluice doctor`"
        if any(sign in text for sign in _GUARDRAIL):
            return FailureKind.ACCESS_DENIED, f"it does not take the configured guardrail ({code})"
        if any(sign in text for sign in _NO_MODEL):
            return FailureKind.MODEL_NOT_FOUND, "there is no such model, or only by an inference profile"
        subjects = ", ".join(dict.fromkeys(_SUBJECTS.findall(text)))
        about = f"; its text speaks of: {subjects}" if subjects else ""
        return FailureKind.INVALID_INPUT, f"it refused the request (ValidationException{about})"
    kind = _CODES.get(code)
    if kind is FailureKind.ACCESS_DENIED:
        return kind, f"access denied ({code}): see `sluice doctor`"
    if kind is not None:
        return kind, f"it answered {code}"
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    shown = code if code.isalnum() and len(code) <= 64 else "an unknown code"
    return kind_of_status(status), f"it answered {shown} (HTTP {status})"
