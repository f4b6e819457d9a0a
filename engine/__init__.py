"""The embedded engine: continuous batching over a paged KV cache, in PyTorch, in a child process.

``EngineClient.submit`` sends a request over a socket (``wire``) to the child (``process``), which adds it to
the queue of the ``scheduler``. In each step the scheduler shares out one token budget and the KV blocks; the
``runner`` flattens what was scheduled and runs the ``model`` once; the ``sampler`` draws one token for every
sequence whose known tokens are all computed. The outputs of a step travel back in one frame.

Only the child imports torch: ``engine``, ``engine.values``, ``engine.errors`` and ``engine.client`` do not.
"""
