"""Held-out evaluation: does a model follow prompts that it was not trained on?

The verifier and the statistics import without MindSpore; `evaluate` loads it.
"""
