"""One file for each runtime: answers to many prompts that arrive at their own times.

def versions() -> dict[str, str]: the relevant packages, by name

class Runner:
    settings: str  # information that a reader needs to judge the figures
    def __init__(self, model: Path, threads: int, context_length: int, options): ...
    def serve(self, prompts, arrivals, new_tokens: int) -> list[Answer]: new_tokens greedy tokens for each prompt,
        end tokens included. arrivals: seconds after the call, ascending, at which each prompt arrives.
"""
