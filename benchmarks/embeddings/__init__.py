"""Vectors through the gateway beside their worker alone, and chats beside a full load of them."""
