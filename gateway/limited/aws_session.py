"""AWS sessions whose ``credential_process`` is killed over a bound. Imports boto3 when it makes one."""

import contextlib
import os
import signal
import subprocess
from functools import partial
from typing import Any

# The longest time for a profile's ``credential_process``, as in AWS's SDK for Go. botocore has none: each
# call to AWS would wait for ever, and the gateway's end too.
CREDENTIAL_PROCESS_S = 60.0


def make_session(
    *, profile: str | None = None, region: str | None = None, process_s: float = CREDENTIAL_PROCESS_S
) -> Any:
    """Make a boto3 session. Raises botocore's errors: there is no such profile."""
    import boto3
    import botocore.session
    from botocore.credentials import AssumeRoleProvider, ProcessProvider

    core = botocore.session.get_session()
    session = boto3.session.Session(botocore_session=core, profile_name=profile, region_name=region)
    # A group of its own: a script's children may hold its output.
    popen = partial(_BoundedProcess, bound_s=process_s, start_new_session=True)

    def bounded(profile_name: str) -> Any:
        return ProcessProvider(profile_name, lambda: core.full_config, popen=popen)

    credentials = core.get_component("credential_provider")
    credentials.insert_before(
        ProcessProvider.METHOD, bounded(core.get_config_variable("profile") or "default")
    )
    # The profile's ``source_profile``; botocore has no public way to give its providers.
    roles = credentials.get_provider(AssumeRoleProvider.METHOD)
    roles._profile_provider_builder._create_process_provider = bounded
    return session


class _BoundedProcess(subprocess.Popen[bytes]):
    """A process that is killed when it takes longer than ``bound_s``."""

    def __init__(self, args: list[str], *, bound_s: float, **options: Any) -> None:
        super().__init__(args, **options)
        self._bound_s = bound_s

    def communicate(self, input: bytes | None = None, timeout: float | None = None) -> tuple[bytes, bytes]:
        try:
            return super().communicate(input, self._bound_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            out, error = super().communicate()
            return out, error + f"killed: no answer after {self._bound_s:g} s".encode()
