"""Configurations of other gateways, read into one value and written as Sluice's."""
