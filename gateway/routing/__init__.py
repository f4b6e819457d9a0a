"""Routing configuration: revisions and the ranking of backends."""
