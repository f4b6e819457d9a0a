"""vLLM in the gateway's process tree; only ``compat`` imports vLLM, and only while the host starts."""
