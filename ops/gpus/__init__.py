"""`sluice serve --gpus`: a worker process for each GPU of one machine, and the gateway in front of them.

Reading order: ``layout`` (which GPUs, and what front and workers are configured to), ``worker`` (one process
and its restarts), ``worker_group`` (all of them, while the front serves).
"""
