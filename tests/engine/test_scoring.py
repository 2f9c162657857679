"""What is told of the likeliest tokens."""

import numpy as np
import pytest

from chunkrt.engine.scoring import likeliest, log_softmax


@pytest.mark.parametrize("number", [0, 1, 5, 20, 50])
@pytest.mark.parametrize("num_values", [1, 2, 7, 1000], ids="of {} different".format)
def test_the_likeliest_are_those_of_a_stable_sort(num_values, number):
    """Of equally likely ones the lower id comes first, where the last place is shared as well."""
    logits = np.random.default_rng(number).integers(0, num_values, 50).astype(np.float32)
    found = log_softmax(logits[None])[0]
    expected = [(int(i), float(found[i])) for i in np.argsort(-found, kind="stable")[:number]]
    told = likeliest(logits, 3, number)
    assert told.top == expected
    assert told.own == found[3]
