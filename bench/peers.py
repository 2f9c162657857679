"""Comparison with other runtimes: prefill and decode of one model on the same cores, in one interleaved run.

    python bench/peers.py smollm2-135m-instruct --threads 2 --rounds 5

The other runtimes are installed in a separate environment, and get the model in the form that each of them reads; both
are kept under `--peers-dir`. `peers/contenders.py` lists the contenders. See `bench/README.md` for the method.
"""

from peers.command import peers

if __name__ == "__main__":
    peers()
