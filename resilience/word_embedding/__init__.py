"""The word embedding: an ``Embedder`` in plain Python. Read ``question_text`` first, then ``model``."""
