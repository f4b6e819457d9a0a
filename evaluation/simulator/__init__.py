"""A discrete-event model of vLLM workers, driven by the production admission code."""
