"""Readiness, health figures, and the drain."""
