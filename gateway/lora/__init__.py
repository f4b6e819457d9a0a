"""LoRA adapters in the gateway: registry, fetch, import, loader, preload orders, model cards."""
