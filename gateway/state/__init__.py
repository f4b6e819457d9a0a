"""The state store: append-only streams of small JSON records that every gateway process follows.

Reading order: ``port`` (the guarantees of a store), ``stream_follower`` (how a process follows a stream, also
while the store is unreachable), ``sqlite_store`` and ``redis_store``, ``memory`` (the fake). The same store
holds idempotent replies and the limits of keys.
"""
