"""The journey of requests without generation, with the same keys, admission, workers and ledger."""
