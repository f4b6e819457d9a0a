"""The faults of a YAML file's values, ready to print."""

from pathlib import Path

from pydantic import ValidationError


def faults_of(error: ValidationError, path: Path) -> list[str]:
    """A line for each: file, key, what is wrong, and the given value."""
    lines = []
    for fault in error.errors(include_url=False):
        key = ".".join(map(str, fault["loc"])) or "the file"
        given = fault.get("input")
        shown = f"; given: {given!r}" if isinstance(given, (str, int, float, bool)) else ""
        lines.append(f"{path}: {key}: {fault['msg']}{shown}")
    return lines
