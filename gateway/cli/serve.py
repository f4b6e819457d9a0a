"""`sluice serve`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gateway.cli.startup import start_errors
from gateway.config import load_settings
from gateway.server import listen, run
from gateway.wiring import build
from observability.logs import configure_logging


def serve(config: Path | None, log_level: str) -> int:
    """Start the gateway and serve until a signal; the exit code."""
    logs = None
    try:
        settings = load_settings(config)
        logs = configure_logging(log_level, settings.server.log_json)
        listener = listen(settings.server.host, settings.server.port)
        host, port = listener.getsockname()[:2]
        with listener:
            gateway = build(settings, admin_key=os.environ.get("SLUICE_ADMIN_KEY") or None)
            _banner(f"http://{host}:{port}", str(config or "defaults"), auth=settings.auth.enabled)
            run(gateway, listener)
    except BaseException as error:
        told = list(start_errors(error))
        if not told:
            raise
        for fault in told:
            text = str(fault) or "the engine did not start within engine.start_timeout_seconds"
            for line in text.splitlines():
                print(f"sluice: {line}", file=sys.stderr)
        print("sluice: not started; `sluice doctor` checks everything at once", file=sys.stderr)
        return 1
    finally:
        if logs is not None:
            logs.close()
    return 0


def _banner(url: str, config: str, *, auth: bool) -> None:
    key = "" if not auth else " -H 'Authorization: Bearer KEY'"
    lines = [
        f"Sluice on {url} (config: {config}, keys: {'required' if auth else 'off'})",
        f"  ready?  curl {url}/ready",
        f"  try     curl -N {url}/v1/generate{key} -H 'Content-Type: application/json' \\",
        '    -d \'{"stream":true,"messages":[{"role":"user","content":"Something like Vinland Saga?"}]}\'',
        f"  docs    {url}/docs",
    ]
    print("\n".join(lines), flush=True)
