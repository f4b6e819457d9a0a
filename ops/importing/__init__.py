"""Reads configurations of other gateways into one intermediate form, and writes it as Sluice's."""
