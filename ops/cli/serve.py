"""`sluice serve`: starts the gateway, and worker processes if asked."""

import atexit
import contextlib
import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from engine.process import LOG_LEVEL_VARIABLE
from gateway.config.errors import ConfigError
from gateway.config.settings import Settings, load_settings
from gateway.http.local_protocol import host_of, is_loopback
from gateway.server import Around, listen, run
from gateway.wiring.build import build
from gateway.wiring.control import DEFAULT_FILE, has_default_file
from observability.logs import LEVELS, configure_logging
from ops.cli.init import worker_configuration
from ops.cli.startup import print_errors, start_errors
from ops.gpus.layout import NUMBER_VARIABLE, gpus_of
from ops.gpus.worker import GivenUp
from ops.gpus.worker_group import make_worker_group

# What to do about a start that failed; nothing after a fault of the options, which the doctor does not see.
CHECK = "`{}` checks everything at once"
CHECK_WORKERS = "`sluice init --worker URL` writes a file that `sluice doctor` checks"


def serve(
    config: Path | None,
    log_level: str,
    *,
    gpus: str | None = None,
    workers: int | None = None,
    urls: Sequence[str] = (),
) -> int:
    """Start the gateway and serve until a signal; returns the exit code.

    Args:
        gpus: ``all``, or indices of GPUs; each gets a worker process.
        workers: number of worker processes that choose their device themselves.
        urls: URLs of running workers, from which the configuration is derived.
    """
    logs, number, advice = None, os.environ.get(NUMBER_VARIABLE), None
    doctor = ["sluice", "doctor", *([] if config is None else ["--config", str(config)])]
    check = CHECK.format(shlex.join(doctor))
    name = "sluice" if number is None else f"sluice: worker {number}"
    try:
        if log_level.lower() not in LEVELS:
            raise ConfigError(f"--log-level is {log_level!r}; allowed: {', '.join(LEVELS)}")
        if urls and (gpus is not None or workers is not None):
            raise ConfigError("--worker: it names running workers; leave out --gpus and --workers")
        base = worker_configuration(urls, os.environ) if urls else None
        advice = CHECK_WORKERS if urls else check
        settings = load_settings(None if urls else config, base=base)
        always = {} if number is None else {"worker_number": number}
        os.environ[LOG_LEVEL_VARIABLE] = log_level
        written = logs = configure_logging(log_level, settings.server.log_json, always=always)
        server = settings.server
        with contextlib.ExitStack() as opened:
            opened.enter_context(_ended_by_sigterm())
            listener = opened.enter_context(listen(server.host, server.port))
            admin = None
            if server.admin_port is not None:
                place = server.admin_host or server.host, server.admin_port
                admin = opened.enter_context(listen(*place, keys="server.admin_host, server.admin_port"))
            around: Around = contextlib.nullcontext
            devices = _devices(settings, gpus, workers)
            if devices:
                group = opened.enter_context(make_worker_group(settings, devices, log_level))
                settings, around = group.front, group.running
            gateway = build(
                settings,
                admin_key=os.environ.get("SLUICE_ADMIN_KEY") or None,
                dropped_log_lines=lambda: written.dropped,
            )
            ports = _url(listener), None if admin is None else _url(admin)
            lines = banner(*ports, source_of(settings, urls, config), settings)
            run(
                gateway,
                listener,
                admin,
                around=around,
                on_started=lambda: print("\n".join(lines), flush=True),
            )
    except BaseException as error:
        reported = list(start_errors(error))
        if not reported:
            raise
        for fault in reported:
            print_errors(str(fault) or "the engine did not start within engine.start_timeout_seconds", name)
        if any(isinstance(fault, GivenUp) for fault in reported):
            print_errors(f"stopped; the workers' lines above have the reason, and {check}", name)
        else:
            print_errors("; ".join(filter(None, ("not started", advice))), name)
        return 1
    finally:
        if logs is not None and not logs.close():
            # Nobody reads standard error, and the thread that writes to it holds its lock: the standard
            # library's flush at the exit would wait for ever.
            atexit.unregister(logging.shutdown)
    return 0


def end_process(status: int) -> NoReturn:
    """End the process of a gateway that has stopped: after the exit handlers, without Python's teardown.

    After the drain nothing is left to release. The teardown frees each imported module and object: seconds of
    CPU time once vLLM is imported, which a rolling restart waits for. It also waits for threads, whose work
    nobody needs now. Standard error needs no flush: Python writes it line by line.
    """
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(status)


def source_of(settings: Settings, urls: Sequence[str], config: Path | None) -> str:
    """The source of the configuration as text; with URLs of workers also a routing file of theirs."""
    if urls and settings.routing.file is None and has_default_file(settings.backends):
        return f"{', '.join(urls)}, routing: {DEFAULT_FILE} of this folder"
    return ", ".join(urls) or str(config or "defaults")


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the start and release its resources, until the gateway runs and can drain."""
    before = signal.signal(signal.SIGTERM, lambda sig, frame: sys.exit(128 + sig))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _devices(settings: Settings, gpus: str | None, workers: int | None) -> Sequence[str | None]:
    """The GPUs of each worker; empty if this process runs the engine."""
    if gpus is not None and workers is not None:
        raise ConfigError("--gpus and --workers: give one of them")
    if workers is not None:
        return [None] * workers
    engine = settings.engine
    each = engine.tensor_parallel_size * engine.pipeline_parallel_size
    return [] if gpus is None else gpus_of(gpus, each=each)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def banner(url: str, admin: str | None, config: str, settings: Settings) -> list[str]:
    """The lines that are printed when the gateway listens; ``admin`` is the operators' port, if any.

    They warn if every machine in reach would be an operator.
    """
    auth = settings.auth.enabled
    key = "" if not auth else " -H 'Authorization: Bearer KEY'"
    documented = url if admin is None or settings.server.public_metrics else admin
    warning = "  warning keys are off: whoever reaches this address is an operator; set auth.enabled: true"
    everybody = not auth and not all(is_loopback(host_of(one)) for one in (url, admin or url))
    return [
        f"Sluice on {url} (config: {config}, keys: {'required' if auth else 'off'})",
        f"  ready?  curl {url}/ready",
        f"  try     curl -N {url}/v1/generate{key} -H 'Content-Type: application/json' \\",
        '    -d \'{"stream":true,"messages":[{"role":"user","content":"Something like Vinland Saga?"}]}\'',
        f"  docs    {documented}/docs",
        *([] if admin is None else [f"  admin   {admin}"]),
        *([warning] if everybody else []),
    ]
