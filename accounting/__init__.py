"""API keys and their limits, usage rows, prices, and the ledger that stores them."""
