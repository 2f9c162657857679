"""`python -m chunkrt`."""

from chunkrt.cli import main

main()
