"""The signature of evaluation reports: `sluice evaluate` makes it, the gateway checks it.

Both sides share a secret. If keys are off, there may be no secret: the signature then only shows that the
tool made the report.
"""

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from typing import Any

SIGNATURE = "signature"
# The first variable that is set has the secret; the second one is always set if keys are on.
KEY_VARIABLES = ("SLUICE_EVALUATION_KEY", "SLUICE_ADMIN_KEY")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def evaluation_key(environ: Mapping[str, str]) -> bytes:
    return next((environ[name] for name in KEY_VARIABLES if environ.get(name)), "").encode()


def sign(report: Mapping[str, Any], key: bytes) -> dict[str, Any]:
    return {**report, SIGNATURE: _signature(report, key)}


def is_signed(report: Mapping[str, Any], key: bytes) -> bool:
    """Whether the report has a valid signature of its content, and a digest of its prompt set."""
    prompts = report.get("prompts")
    digest = prompts.get("sha256") if isinstance(prompts, Mapping) else None
    given = report.get(SIGNATURE)
    return (
        isinstance(digest, str)
        and _SHA256.fullmatch(digest) is not None
        and isinstance(given, str)
        and hmac.compare_digest(given.encode(), _signature(report, key).encode())
    )


def _signature(report: Mapping[str, Any], key: bytes) -> str:
    content = {name: value for name, value in report.items() if name != SIGNATURE}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
