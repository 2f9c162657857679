"""An installed package gives the same bits on every processor of a kind."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ANSWER = Path(__file__).with_name("answer.py")
EMULATOR = shutil.which("qemu-x86_64-static")


def answered(*before, **environment):
    command = [*before, sys.executable, "-P", ANSWER]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def best():
    return answered()


def test_answer_reports_its_configuration(best):
    assert "reference" not in best["kernels"]
    assert best["text"]


def test_kernels_that_any_processor_has_give_the_same_bits(best):
    assert answered(CHUNKRT_FORCE_ISA="reference") == best | {"kernels": ["reference"]}


@pytest.mark.slow
@pytest.mark.skipif(EMULATOR is None, reason="needs qemu-x86_64-static")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64")
def test_processor_without_avx_gives_the_same_bits(best):
    assert answered(EMULATOR, "-cpu", "Nehalem") == best | {"kernels": ["reference"]}
