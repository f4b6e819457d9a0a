"""What forwarding a request costs, compared with other gateways: ``python -m benchmarks.forwarding``.

Read the modules in this order: ``workload`` (the requests and answers), ``worker`` (the fake worker),
``client`` and ``load`` (the load generator), ``gateways`` (which gateways are measured and how each is
started), ``rounds`` (the run), ``report`` and ``plot`` (what is shown).
"""
