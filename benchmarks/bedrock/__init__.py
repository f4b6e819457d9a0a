"""A stand-in for Bedrock, for tests, benchmarks and `sluice chaos`."""
