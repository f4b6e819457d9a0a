"""Is a new version of a LoRA adapter as good as the one that is served? Reading order: ``prompts``,
``checks``, ``thresholds``, ``intervals``, ``verdict``; ``losses`` and ``answers`` run the models; ``run``
puts them together, ``report`` and ``__main__`` tell.
"""
