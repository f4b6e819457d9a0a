"""How much fits on a GPU: weights, workspace, KV blocks, sequences; pure arithmetic, no GPU asked.

Reading order: ``shape`` (what of a model takes memory), ``gpus``, ``arithmetic`` (``plan_engine``).
"""
