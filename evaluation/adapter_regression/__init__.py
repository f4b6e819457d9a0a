"""Is a new version of a LoRA adapter as good as the served one? Reading order: ``prompts``, ``checks``,
``thresholds``, ``intervals``, ``verdict``; ``losses`` and ``answers`` run the models; ``run`` combines them,
``findings``, ``report`` and ``__main__`` print the result.
"""
