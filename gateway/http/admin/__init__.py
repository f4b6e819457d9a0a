"""The operators' paths: one router a noun, next to its service in ``gateway.admin``."""
