"""Computes what fits on a GPU: weights, workspace, KV blocks, sequences. Pure arithmetic, without a GPU.

Reading order: ``shape`` (GPUs, and what of a model takes memory), ``arithmetic`` (``plan_engine``).
"""
