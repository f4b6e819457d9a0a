"""The state store: append-only streams of small JSON records that every gateway process keeps up with.

Reading order: ``port`` (what a store promises), ``follower`` (how a process keeps up with a stream, also
while the store is away), ``sqlite_store`` and ``redis_store``, ``memory`` (the fake), ``make`` (which one a
url means). In the same place, beside the streams: answers kept under an idempotency key.
"""
