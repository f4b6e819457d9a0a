"""The demo model: its dialogue generator, tokenizer and training script."""
