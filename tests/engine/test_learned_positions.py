"""Decoders with learned positions: positions end with the table."""

import numpy as np
import pytest
from fixture_checkpoints import checkpoint

import chunkrt
from chunkrt._native import ProgramBuilder, ThreadPool
from chunkrt.errors import ConfigError

NAMES = ("gpt2", "gpt_bigcode", "opt", "opt_norms_behind")
CONTEXT = 128


def load(name, **options):
    return chunkrt.load(checkpoint(name), **{"npu": "reference", "scheme": "float", "chunk_length": 7} | options)


@pytest.mark.parametrize("npu", ["reference", "native"])
@pytest.mark.parametrize("name", NAMES)
def test_positions_beyond_the_table_are_refused_in_one_line(name, npu):
    options = {"npu": npu, "scheme": "w8a8-dynamic"}
    with pytest.raises(ConfigError, match=f"`context_length` is {CONTEXT + 1}, but the model takes at most {CONTEXT}"):
        load(name, **options, context_length=CONTEXT + 1)
    with load(name, **options) as engine:
        session = engine.session()
        session.prefill([3] * CONTEXT)
        with pytest.raises(ConfigError) as refused:
            session.prefill([3])
    assert "context" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_context_shift_is_refused_by_name():
    with pytest.raises(ConfigError, match="gpt2 adds learned positions"):
        load("gpt2", context_shift=True)


@pytest.mark.parametrize(("first", "rows"), [(-1, 1), (5, 1), (3, 3), (0, 6)])
def test_native_operator_refuses_positions_outside_of_its_table(first, rows):
    builder = ProgramBuilder(ThreadPool(1), 8)
    hidden, position = builder.input("x", "float32", ["T", 3]), builder.input("position", "int64", [1])
    table = np.arange(15, dtype=np.float32).reshape(5, 3)
    builder.output("y", builder.add_positions(hidden, builder.constant(table), position))
    program = builder.build()
    x, y = np.zeros((rows, 3), np.float32), np.zeros((rows, 3), np.float32)
    with pytest.raises(IndexError, match=rf"{rows} rows from position {first} on are not inside the 5 positions"):
        program.run([x, np.array([first])], [y])
    program.run([x[:1], np.array([4])], [y[:1]])
    np.testing.assert_array_equal(y[0], table[4])
