"""The ledger's tables through time (Alembic); run at every start by ``accounting.store_schema``."""
