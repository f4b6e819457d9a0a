"""A Bedrock of our own, for tests, benchmarks and `sluice chaos`."""
