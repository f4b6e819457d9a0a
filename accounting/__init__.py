"""Keys, usage rows and the ledger."""
