"""Where a replica finds its configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClusterPlace:
    """The same on every node of the cluster.

    Only these two travel: each replica reads the file and its own environment, so no password or key lies in
    the cluster's store.

    Args:
        config: path of the configuration's YAML file.
        folder: the working folder, against which paths in the file are resolved.
        application: name of the Serve application.
    """

    config: str
    folder: str
    application: str
