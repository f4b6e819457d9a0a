"""The S3 client and the meaning of its errors."""

from typing import Any

from gateway.config.engine import WeightsSection
from gateway.limited.aws_session import make_session
from gateway.weights.errors import FetchError, NotThere, Unreachable

# The client's attempts for one request, until the body begins.
REQUEST_ATTEMPTS = 3
_NOT_THERE = frozenset({"404", "NoSuchBucket", "NoSuchKey", "NotFound"})
_DENIED = frozenset((
    "401", "403", "AccessDenied", "AllAccessDisabled", "ExpiredToken", "Forbidden", "InvalidAccessKeyId",
    "InvalidToken", "SignatureDoesNotMatch",
))  # fmt: skip
_CHANGED = frozenset({"412", "PreconditionFailed"})


def make_client(section: WeightsSection) -> Any:
    """Make a thread-safe client; credentials come from the AWS SDK's usual chain.

    Raises FetchError without boto3, for malformed credentials or a malformed endpoint.
    """
    try:
        import botocore.config
        import botocore.exceptions

        return make_session(region=section.region).client(
            "s3",
            endpoint_url=section.endpoint_url,
            config=botocore.config.Config(
                connect_timeout=section.connect_timeout_seconds,
                read_timeout=section.read_timeout_seconds,
                retries={"total_max_attempts": REQUEST_ATTEMPTS, "mode": "standard"},
                max_pool_connections=section.connections,
                # S3 services other than AWS rarely have a host name per bucket.
                s3={"addressing_style": "path" if section.endpoint_url else "auto"},
                # Ranges have no checksum; complete files are checked.
                response_checksum_validation="when_required",
            ),
        )
    except ImportError:
        raise FetchError("s3:// needs boto3: pip install 'sluice-gateway[s3]'") from None
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        raise FetchError(f"S3 client: {one_line(error)}; see weights.endpoint_url and AWS_PROFILE") from None


def transient(error: BaseException) -> bool:
    """Whether another attempt may help: the connection broke, or the service is overloaded."""
    import botocore.exceptions as boto

    if isinstance(error, boto.ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return bool(status >= 500 or status == 429)
    return isinstance(error, (boto.HTTPClientError, boto.IncompleteReadError))


def meaning(error: Exception, where: str) -> FetchError:
    import botocore.exceptions as boto

    if isinstance(error, FetchError):
        return error
    if isinstance(error, boto.ClientError):
        code = str(error.response.get("Error", {}).get("Code", ""))
        message = f"{where}: S3 says {code}"
        if code in _NOT_THERE:
            return NotThere(f"{message}; check the bucket and the prefix")
        if code in _DENIED:
            return FetchError(
                f"{message}; the credentials need s3:ListBucket and s3:GetObject there (AWS_PROFILE, "
                "AWS_ACCESS_KEY_ID or the machine's role)"
            )
        if code in _CHANGED:
            return FetchError(f"{where} was replaced while it was fetched; start again")
        return Unreachable(f"{message}; try again, or see weights.endpoint_url and weights.region")
    if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError, boto.TokenRetrievalError)):
        return FetchError(
            f"{where}: no AWS credentials found; set AWS_PROFILE, or AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or give the machine a role"
        )
    return Unreachable(
        f"{where}: {one_line(error)}; what has arrived is kept: start again, or see weights.endpoint_url"
    )


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
