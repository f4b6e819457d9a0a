"""What one forwarded request costs a gateway, in figures that a busy machine does not move.

``python -m benchmarks.request_cost`` counts Python calls by room of the product, timers, tasks and hand-overs
between threads, for whole answers, streams and vectors, of Sluice or of a bare FastAPI and aiohttp proxy.
"""
