"""Conversion to one form of a model, in the other runtimes' environment: `python -m peers.convert ENGINE SOURCE TARGET
OPTIONS`.
"""

import json
import sys
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    engine, source, target, options = sys.argv[1:]
    import_module(f"peers.engines.{engine}").convert(Path(source), Path(target), json.loads(options))
