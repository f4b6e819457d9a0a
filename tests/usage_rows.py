"""Reads the ledger's rows back."""

from sqlalchemy import select

from accounting.ledger import Ledger
from accounting.store import GenerationStore
from accounting.tables import generations
from accounting.values import UsageRow


async def newest_rows(ledger: Ledger | GenerationStore, limit: int = 100) -> list[UsageRow]:
    """The rows with the latest start, newest first."""
    query = select(generations).order_by(generations.c.started_at.desc(), generations.c.generation_id)
    found = await ledger.select(query.limit(limit))
    return [UsageRow(**{name: one[name] for name in UsageRow.__struct_fields__}) for one in found]
