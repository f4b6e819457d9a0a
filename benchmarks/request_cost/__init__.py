"""What one forwarded request costs a gateway, in figures that do not depend on the machine's load.

``python -m benchmarks.request_cost`` counts Python calls by package, timers, tasks and hand-overs between
threads, for whole answers, streams and embeddings, of Sluice or of a bare FastAPI and aiohttp proxy.
"""
