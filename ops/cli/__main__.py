"""`python -m ops.cli` is `sluice`."""

from ops.cli.main import main

main()
