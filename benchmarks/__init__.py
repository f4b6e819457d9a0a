"""Benchmarks; each prints its figures and the ratio that matters."""
