"""Evaluation: how good a model is under a scheme and on a backend, and how far from another scheme (its base).

Text and tasks are the caller's own files. `text` measures perplexity and divergence, `hellaswag` and `lambada` are
tasks, `harness` is an adapter for lm-evaluation-harness, which has all the others.
"""
