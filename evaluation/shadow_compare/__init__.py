"""Compares shadowed pairs from the ledger's database, without a gateway, and logs the comparison."""
