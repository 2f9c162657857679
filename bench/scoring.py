"""Scoring of HellaSwag's kind of items: many items at once, one by one, and with transformers in batches.

    python bench/scoring.py smollm2-135m-instruct --text wikitext-2-valid.txt --items 1000 --json scoring.json

See `bench/README.md` for the method.
"""

from peers.scoring import scoring

if __name__ == "__main__":
    scoring()
