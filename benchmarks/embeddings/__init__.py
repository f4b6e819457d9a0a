"""Embeddings through the gateway against their worker alone, and chats during a full load of them."""
