"""Evaluation: quality of a model under a scheme and on a backend, and its distance from another scheme (its base).

Texts and tasks are files that the caller provides. `text` measures perplexity and divergence, `hellaswag` and `lambada`
are tasks, and `harness` is an adapter for lm-evaluation-harness, which provides all other tasks.
"""
