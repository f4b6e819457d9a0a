"""Sluice on Amazon SageMaker: the container's contract, the endpoint, and what it scales on."""
