"""The state store: append-only streams of small JSON records that every gateway process follows.

Reading order: ``port`` (what a store guarantees), ``stream_follower`` (how a process keeps up with a stream,
also while the store is away), ``sqlite_store`` and ``redis_store``, ``memory`` (the fake). The same store
holds idempotent replies and the limits of keys.
"""
