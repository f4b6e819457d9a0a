"""Starts TensorZero's gateway from its wheel: CONFIG PORT_FILE. Run by the Python that has the package."""

import signal
import sys
from pathlib import Path
from typing import Any

from tensorzero import tensorzero  # type: ignore[import-not-found,unused-ignore]


def main(config: str, port_file: str) -> None:
    """Serve until a signal; the gateway chooses its own port, which is written to the file."""
    gateway: Any = tensorzero._start_http_gateway(
        config_file=config, clickhouse_url=None, postgres_url=None, valkey_url=None, async_setup=False
    )
    part = Path(f"{port_file}.part")
    part.write_text(gateway.base_url.split(":")[2].partition("/")[0])
    part.rename(port_file)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main(*sys.argv[1:3])
