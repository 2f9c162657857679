"""Compare docs/tour.md with the code: it names the files that a compilation enters."""

import gc
import re
import sys
from pathlib import Path

from fixture_checkpoints import checkpoint

import chunkrt
from chunkrt.compile.compiler import compile_checkpoint
from chunkrt.quant.scheme import SCHEMES, Recipe

TOUR = Path(__file__).parents[1] / "docs" / "tour.md"
PACKAGE = Path(chunkrt.__file__).parent


def files_entered(call):
    """Return the files of the package that a call enters, without finalizers of other tests' objects."""
    found = set()
    gc.collect()

    def enter(frame, event, argument):
        if event == "call" and frame.f_code.co_name != "<module>":
            found.add(frame.f_code.co_filename)

    gc.disable()
    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    paths = map(Path, found)
    return {path.relative_to(PACKAGE).as_posix() for path in paths if path.is_relative_to(PACKAGE)}


def test_tour_names_the_files_that_a_compilation_enters(tmp_path):
    recipe, folder = Recipe(scheme=SCHEMES["w8a8-dynamic"]), tmp_path / "engine"
    entered = files_entered(lambda: compile_checkpoint(checkpoint("llama_gqa"), recipe, {}, folder, model="toy"))
    assert len(entered) <= 22
    section = TOUR.read_text(encoding="utf-8").split("\n## ")[1]
    numbered = re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.MULTILINE)
    assert len(numbered) == len(set(numbered))
    assert set(numbered) == entered
