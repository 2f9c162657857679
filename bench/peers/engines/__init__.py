"""One file for each runtime: conversion of a model to its form (`convert`), and its calls (`Runner`).

A module imports its runtime only on use, so that the list of contenders can be read without any of them.

    def versions() -> dict[str, str]: the relevant packages, by name
    def convert(source: Path, target: Path, options) -> None: only if it reads another form than the checkpoint

    class Runner:
        settings: str  # information that a reader needs to judge the figures
        def __init__(self, model: Path, threads: int, context_length: int, options): ...
        def reset(self, room: int) -> None: an empty context with room for `room` tokens; its time does not count
        def prefill(self, tokens) -> None: the forward pass of a prompt, up to the logits of its last token
        def decode(self, tokens) -> None: one pass for each token, with a key-value cache. A runtime that cannot take
            single tokens starts from the first one and continues with its own generated tokens.
        def next_token(self) -> int: the most likely token after the last prefill; its time does not count
"""
