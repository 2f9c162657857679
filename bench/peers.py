"""chunkrt beside other runtimes: prefill and decode of one model on the same cores, in one interleaved run.

    python bench/peers.py smollm2-135m-instruct --threads 2 --rounds 5

The peers get an environment of their own, and the model in the form that each of them reads; both are kept under
`--peers-dir`. `peers/contenders.py` lists who is measured. See `bench/README.md` for what is measured, and how.
"""

from peers.command import peers

if __name__ == "__main__":
    peers()
