"""One file for each runtime: scoring of continuations after contexts.

def versions() -> dict[str, str]: the relevant packages, by name

class Runner:
    settings: str  # information that a reader needs to judge the figures
    def __init__(self, model: Path, threads: int, context_length: int, options): ...
    def score(self, pairs) -> tuple[list[float], int, int]: the log-probability of each continuation after its context,
        both token ids; the number of rows computed, one for each token; and the number including padding.
"""
