"""The `chunkrt` command, and `python -m chunkrt`.

The command line is imported inside `main`, so that Ctrl-C during the imports ends like Ctrl-C at any other time.
"""

import sys


def main() -> None:
    """Run the command line. Ctrl-C exits with status 130."""
    try:
        from chunkrt.cli import main as run

        run()
    except KeyboardInterrupt:
        if sys.stderr is not None:
            print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
