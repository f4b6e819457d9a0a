"""Builds the parts that store files and run batches."""

import uuid
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import structlog

from accounting.account import Accounts, HeldRows
from accounting.batches import BatchStore
from accounting.values import UsageRow
from gateway.batches.batches import Batches
from gateway.batches.capacity import IdleCapacity
from gateway.batches.files import Files
from gateway.batches.runner import BatchRunner
from gateway.batches.storage import FileStorage, LocalFiles
from gateway.config.errors import ConfigError
from gateway.embedding.journey import EmbeddingJourney
from gateway.http.batch_lines import BatchLines
from gateway.journey import Journey
from gateway.ports import Services
from gateway.requests.request_record import Reporter
from gateway.weights.errors import FetchError
from gateway.weights.location import s3_prefix
from gateway.wiring.core import Core
from gateway.wiring.foundation import Foundation, make_cipher
from observability.events import RequestRecord
from observability.trace_facts import EdgeRecord


@dataclass(frozen=True, slots=True)
class BatchParts:
    """The parts that store files and run batches."""

    files: Files
    batches: Batches
    runner: BatchRunner


def make_batches(core: Core) -> BatchParts:
    """Build the parts. Raises ConfigError for the storage or an encryption key."""
    base = core.base
    section, ledger = base.settings.batches, base.settings.ledger
    files = Files(section=section)
    if section.enabled and not ledger.in_memory:
        store = BatchStore(ledger.url, uuid.uuid4().hex, base.unix_time)
        files = Files(store, make_storage(base), section, base.unix_time)
    controller = core.backends.admission
    capacity = IdleCapacity(lambda: controller.gates, base.clock, section.headroom)
    runner = BatchRunner(files, capacity, base.clock)
    return BatchParts(files, Batches(files, runner.lines_per_s), runner)


def make_storage(base: Foundation) -> FileStorage:
    """Build the storage of files' contents. Raises ConfigError for a library, an address or a key."""
    folder, cipher = base.settings.batches.folder, make_cipher(base.settings, "files")
    if not folder.startswith("s3://"):
        if base.settings.ledger.url.startswith("postgresql") and not Path(folder).is_absolute():
            structlog.get_logger("gateway").warning(
                "other gateways on this database may not find the files of batches",
                folder=str(Path(folder).absolute()),
                hint="set batches.folder to a folder that all of them share, or to s3://bucket/prefix",
            )
        return LocalFiles(Path(folder), cipher)
    from gateway.batches.s3_files import S3Files
    from gateway.weights.s3_client import make_client

    try:
        return S3Files(make_client(base.settings.weights), s3_prefix(folder), cipher)
    except FetchError as error:
        raise ConfigError(f"batches.folder: {error}") from None


def make_lines(core: Core, services: Services, journey: Journey, embeddings: EmbeddingJourney) -> BatchLines:
    """Build the runner of batch lines: it uses the normal journeys, and bills a line with its result."""
    factor, price = core.base.settings.batches.price_factor, core.accounts.accounts.price

    def priced(row: UsageRow) -> UsageRow:
        row = price(row)
        return msgspec.structs.replace(row, cost_nanousd=round(row.cost_nanousd * factor))

    bills, in_flight = HeldRows(), journey.in_flight
    accounts = Accounts(bills, priced)
    reporter = of_lines(journey.reporter)
    own = replace(
        services,
        journey=replace(journey, accounts=accounts, reporter=reporter),
        embeddings=replace(embeddings, accounts=accounts, reporter=reporter),
    )
    return BatchLines(own, bills, lambda: in_flight.draining)


def of_lines(reporter: Reporter) -> Reporter:
    """Build a reporter whose records are marked as lines of batches."""

    def emit(record: RequestRecord | EdgeRecord) -> None:
        if isinstance(record, RequestRecord):
            record.batch_line = True
        reporter.emit(record)

    return replace(reporter, emit=emit)
