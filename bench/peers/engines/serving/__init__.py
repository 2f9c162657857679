"""One file a runtime: how it answers many prompts that come at their own times.

def versions() -> dict[str, str]: the packages that matter, by name

class Runner:
    settings: str  # what a reader must know to judge the figures
    def __init__(self, model: Path, threads: int, context_length: int, options): ...
    def serve(self, prompts, arrivals, new_tokens: int) -> list[Answer]: greedy tokens for each prompt, so many
        whatever they are. arrivals: seconds after the call, ascending, at which each prompt is there.
"""
