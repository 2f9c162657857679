"""chunkrt beside other runtimes with many sequences at once: throughput, time to first token, gaps between tokens.

    python bench/serving.py smollm2-135m-instruct --threads 2 --sessions 8 --rounds 5

Or servers that run already, of chunkrt or any that speaks OpenAI's API:

    python bench/serving.py --url http://127.0.0.1:8080/v1 --rate 1 --rate 2 --requests 64

See `bench/README.md` for what is measured, and how.
"""

import sys

from peers.remote import remote
from peers.serving import serving

if __name__ == "__main__":
    is_remote = any(argument.partition("=")[0] == "--url" for argument in sys.argv)
    (remote if is_remote else serving)()
