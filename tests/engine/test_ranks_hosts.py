"""Ranks on four hosts, which are network namespaces whose network delays and loses packets."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import rank_program
from fixture_checkpoints import checkpoint, expected_logits, input_ids
from rank_hosts import hosts, reason_against_hosts

TOLERANCE = 1e-4
HANGS = 300


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_gqa", "qwen2_moe", "qwen3_next"])
def test_logits_of_four_hosts_equal_those_of_transformers(name, tmp_path):
    """Packets take 2 ms in each direction, and one of a thousand is lost; the prompt has chunks of 8 tokens."""
    if find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed: chunkrt[mpi]")
    if reason := reason_against_hosts():
        pytest.skip(reason)
    with hosts(4, tmp_path) as (start, switch):
        arguments = (Path(rank_program.__file__), "logits", checkpoint(name), json.dumps(input_ids(name)))
        finished = subprocess.run(
            [*start, sys.executable, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HANGS,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        )
        assert switch.num_forwarded > 100
    assert finished.returncode == 0, finished.stderr
    found = np.array(json.loads(finished.stdout))
    np.testing.assert_allclose(found, expected_logits(name), rtol=0, atol=TOLERANCE)
