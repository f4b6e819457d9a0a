"""`python -m gateway.cli` is `sluice`."""

from gateway.cli.main import main

main()
