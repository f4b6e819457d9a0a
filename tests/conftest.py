"""What holds for the whole suite."""

from __future__ import annotations

from hypothesis import settings

# A single example has no deadline: on a shared machine a pause of half a second says nothing about the code.
# Tests of speed measure it themselves, and every test has its own limit (`timeout` in pyproject.toml).
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")
