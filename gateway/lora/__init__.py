"""LoRA adapters inside the gateway: registry, fetch, import, loader."""
