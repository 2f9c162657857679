"""One file a runtime: how it scores what follows contexts.

def versions() -> dict[str, str]: the packages that matter, by name

class Runner:
    settings: str  # what a reader must know to judge the figures
    def __init__(self, model: Path, threads: int, context_length: int, options): ...
    def score(self, pairs) -> tuple[list[float], int, int]: the log-probability of each continuation after its context,
        both token ids; the rows that were computed for them, tokens each; and those with the padding beside them.
"""
