"""Choose the likeliest ending of a sentence, by log-probability per byte, as HellaSwag is scored.

python examples/score_endings.py [MODEL]
"""

import sys

import chunkrt

CONTEXT = "The chef put the cake into the oven and"
ENDINGS = (" waited until it was baked.", " painted it with a broom.", " sang it to sleep in the garage.")


def main(model: str) -> None:
    with chunkrt.load(model, progress=True) as engine:
        scores = engine.score([(CONTEXT, ending) for ending in ENDINGS])
    ranked = sorted(
        zip(ENDINGS, scores, strict=True), key=lambda pair: -pair[1].log_probability / len(pair[0].encode())
    )
    for ending, score in ranked:
        print(f"{score.log_probability / len(ending.encode()):8.3f}  {CONTEXT}{ending}")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["smollm2-135m-instruct"])
