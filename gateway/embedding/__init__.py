"""Vectors of texts: their own short journey, through the same keys, admission, workers and ledger."""
