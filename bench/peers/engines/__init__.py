"""One file a runtime: how a model is brought into its form (`convert`), and how it runs (`Runner`).

A module imports its runtime only when it is used, so that the list of contenders can be read without any of them.

    def versions() -> dict[str, str]: the packages that matter, by name
    def convert(source: Path, target: Path, options) -> None: only where another form than the checkpoint is read

    class Runner:
        settings: str  # what a reader must know to judge the figures
        def __init__(self, model: Path, threads: int, context_length: int, options): ...
        def reset(self, room: int) -> None: an empty context with room for so many tokens; its time does not count
        def prefill(self, tokens) -> None: the forward pass of a prompt, up to the logits of its last token
        def decode(self, tokens) -> None: as many passes of one token each, with a key-value cache. A runtime that
            cannot be fed single tokens starts from the first one and goes on with what it generates.
        def next_token(self) -> int: the most likely token after the last prefill; its time does not count
"""
