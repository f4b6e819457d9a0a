"""Files and batches."""

import uuid
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from accounting.account import Accounts, HeldRows
from accounting.batches import BatchStore
from accounting.values import UsageRow
from gateway.batches.batches import Batches
from gateway.batches.capacity import IdleCapacity
from gateway.batches.files import Files
from gateway.batches.runner import BatchRunner
from gateway.batches.storage import ContentCipher, LocalFiles
from gateway.config.settings import SEAL_KEY
from gateway.embedding.journey import EmbeddingJourney
from gateway.http.batch_lines import BatchLines
from gateway.journey import Journey
from gateway.ports import Services
from gateway.wiring.core import Core
from gateway.wiring.foundation import Foundation, keys_of


@dataclass(frozen=True, slots=True)
class BatchParts:
    """What stores files, and runs batches."""

    files: Files
    batches: Batches
    runner: BatchRunner


def make_batches(core: Core) -> BatchParts:
    """Build it. Raises ConfigError: a key for encryption."""
    base = core.base
    section, ledger = base.settings.batches, base.settings.ledger
    files = Files(section=section)
    if section.enabled and not ledger.in_memory:
        store = BatchStore(ledger.url, uuid.uuid4().hex)
        files = Files(store, LocalFiles(Path(section.folder), make_cipher(base)), section, base.unix_time)
    controller = core.control.admission
    capacity = IdleCapacity(lambda: controller.gates, base.clock, section.headroom)
    runner = BatchRunner(files, capacity, base.clock, base.unix_time)
    return BatchParts(files, Batches(files, base.unix_time, runner.lines_per_s), runner)


def make_cipher(base: Foundation) -> ContentCipher | None:
    """Encrypts files; ``None`` without a key."""
    keys = keys_of("responses.seal_key_file", base.settings.responses.seal_key_file, SEAL_KEY)
    if not keys:
        return None
    from gateway.batches.encryption import AesCipher

    return AesCipher(keys)


def make_lines(core: Core, services: Services, journey: Journey, embeddings: EmbeddingJourney) -> BatchLines:
    """Runs lines: in the journeys of all requests, with accounts that are settled with the results."""
    factor, price = core.base.settings.batches.price_factor, core.accounts.accounts.price

    def priced(row: UsageRow) -> UsageRow:
        row = price(row)
        return msgspec.structs.replace(row, cost_nanousd=round(row.cost_nanousd * factor))

    bills, in_flight = HeldRows(), journey.in_flight
    accounts = Accounts(bills, priced)
    own = replace(
        services,
        journey=replace(journey, accounts=accounts),
        embeddings=replace(embeddings, accounts=accounts),
    )
    return BatchLines(own, bills, lambda: in_flight.draining)
