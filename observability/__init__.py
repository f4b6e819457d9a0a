"""Metrics, traces and logs, fed by the leaves' events."""
