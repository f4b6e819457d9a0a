"""How much fits on a GPU: weights, workspace, KV blocks, sequences; pure arithmetic, no GPU asked.

Reading order: ``shape`` (GPUs, and what of a model takes memory), ``arithmetic`` (``plan_engine``).
"""
