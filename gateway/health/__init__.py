"""Readiness and health figures."""
