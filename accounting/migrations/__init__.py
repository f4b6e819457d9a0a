"""Alembic migrations of the ledger's tables; ``accounting.store_schema`` runs them at every start."""
