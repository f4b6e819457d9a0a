"""What forwarding a request costs, beside other gateways: ``python -m benchmarks.forwarding``.

The order of reading: ``workload`` (what is asked and answered), ``worker`` (the fake worker), ``client`` and
``load`` (the load generator), ``gateways`` (who is measured, and how each is started), ``rounds`` (the run),
``report`` and ``plot`` (what is shown).
"""
