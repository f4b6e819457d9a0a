"""Faults on purpose, measured; and the scenarios of ``sluice chaos``."""
