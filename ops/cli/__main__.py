"""Runs `sluice` as `python -m ops.cli`."""

from ops.cli.main import main

main()
