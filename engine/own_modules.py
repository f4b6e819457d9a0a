"""The environment of a child process that runs a module of the product with ``python -m``."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_SOURCE_ROOT: Final = Path(__file__).resolve().parents[1]


def with_own_modules(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ``, with which a child imports the same code as this process, installed or not.

    ``python -m`` searches the working folder first; without ``PYTHONSAFEPATH`` a package ``engine`` or
    ``ops`` there would run in place of the product's.
    """
    paths = [str(_SOURCE_ROOT), *filter(None, [environ.get("PYTHONPATH")])]
    return {**environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
