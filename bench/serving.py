"""chunkrt beside other runtimes with many sequences at once: throughput, time to first token, gaps between tokens.

    python bench/serving.py smollm2-135m-instruct --threads 2 --sessions 8 --rounds 5

See `bench/README.md` for what is measured, and how.
"""

from peers.serving import serving

if __name__ == "__main__":
    serving()
