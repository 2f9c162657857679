"""Comparison with other runtimes on many sequences at once: throughput, time to first token, gaps between tokens.

    python bench/serving.py smollm2-135m-instruct --threads 2 --sessions 8 --rounds 5

It also measures running servers, of chunkrt or any other with OpenAI's API:

    python bench/serving.py --url http://127.0.0.1:8080/v1 --rate 1 --rate 2 --requests 64

See `bench/README.md` for the method.
"""

import sys

from peers.remote import remote
from peers.serving import serving

if __name__ == "__main__":
    is_remote = any(argument.partition("=")[0] == "--url" for argument in sys.argv)
    (remote if is_remote else serving)()
