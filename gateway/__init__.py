"""The gateway: the request's journey, its HTTP edge, and the only place that constructs things."""
