"""Injected faults, measured; and the scenarios of ``sluice chaos``."""
