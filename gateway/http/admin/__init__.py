"""The operators' paths: one router per noun, whose service is in ``gateway.admin``."""
