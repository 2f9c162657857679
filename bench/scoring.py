"""Scoring of endings as HellaSwag has them: many items at once, one by one, and by transformers in batches.

    python bench/scoring.py smollm2-135m-instruct --text wikitext-2-valid.txt --items 1000 --json scoring.json

See `bench/README.md` for what is measured, and how.
"""

from peers.scoring import scoring

if __name__ == "__main__":
    scoring()
