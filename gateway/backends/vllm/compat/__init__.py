"""Everything that depends on vLLM's version: its arguments, requests, outputs, figures and errors.

Written against vLLM 0.32 and 0.33 (V1 engine, ``AsyncLLM``), CUDA and CPU builds alike. Only this package
imports vLLM, and only once ``start.load`` has: that takes seconds and gigabytes.
"""
