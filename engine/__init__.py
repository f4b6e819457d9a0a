"""The embedded engine: continuous batching over a paged KV cache, in PyTorch, in a child process.

Reading order: ``values``, ``errors``, ``limits``, ``sequence``, ``prefix_cache``, ``block_pool``,
``scheduler``, ``attention``, ``operators``, ``linear``, ``lora``, ``model``, ``chance``, ``penalties``,
``structured``, ``sampler``, ``runner``, ``text``, ``engine``; what is faster on one kind of device:
``kernels`` (CPU), ``paged`` and ``graphs`` (CUDA); what starts it: ``loader``, ``lora_loader``, ``kv_pool``,
``build``; then the process boundary: ``wire``, ``adapter_desk``, ``process``, ``client``.

A request's life:

1. ``EngineClient.submit`` checks it and sends it over a socket to the child (``client``, ``wire``).
2. The child adds it to the scheduler's waiting queue (``process``, ``Engine.add``).
3. Each ``Engine.step`` the scheduler hands out one token budget and the blocks for it; blocks that hold the
   same prefix already are shared (``scheduler``, ``block_pool``, ``prefix_cache``).
4. The runner flattens what was scheduled and runs the model once over it (``runner``, ``model``,
   ``attention``).
5. The sampler draws one token for every sequence whose known tokens are all computed (``sampler``,
   ``chance``), after what the request wants changed or forbidden (``penalties``, ``structured``).
6. The token becomes text, and may end the sequence: stop id, stop string, length (``text``, ``sequence``).
7. All outputs of the step travel back in one frame; the ticket of each request receives its part
   (``client``).
8. The end, or an abort, gives the blocks back to the pool at once.

Only the child imports torch: ``engine``, ``engine.values``, ``engine.errors`` and ``engine.client`` do not.
"""
