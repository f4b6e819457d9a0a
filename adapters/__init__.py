"""The LoRA adapter registry: which adapter serves a request."""
