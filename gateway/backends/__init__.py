"""Backends that generate: one port, several implementations."""
