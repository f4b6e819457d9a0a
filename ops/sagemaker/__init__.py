"""Sluice on Amazon SageMaker: the container's contract, the endpoint, and the signals for its autoscaling."""
