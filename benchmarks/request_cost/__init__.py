"""What one forwarded request costs a gateway, in figures that a busy machine does not move.

``python -m benchmarks.request_cost`` counts Python calls, timers, tasks and hand-overs between threads by room
of the product, for whole answers and for streams, beside a bare FastAPI and aiohttp proxy.
"""
