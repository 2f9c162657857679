"""Foldings and calibration of decoders with linear attention, whose channels are not changed."""

import numpy as np
import pytest
from fixture_checkpoints import checkpoint
from folding_models import Model, assert_same, both, equalised, rotated

from chunkrt.checkpoints.checkpoint import open_checkpoint
from chunkrt.compile.calibrate import calibrate
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.errors import QuantizationError
from chunkrt.graph.decoders import build_decoder
from chunkrt.graph.plan import linear_nodes, linear_weights

BEHIND = {"lfm2": ".conv.out_proj.", "qwen3_next": ".linear_attn.out_proj.", "qwen3_5": ".linear_attn.out_proj."}
"""Linears whose input comes from linear attention."""
BEFORE = {"lfm2": (".conv.in_proj.",), "qwen3_next": (".linear_attn.qkv_proj.", ".linear_attn.ba_proj.")}
BEFORE["qwen3_5"] = BEFORE["qwen3_next"]
"""Linears that make its inputs. If a rule covers all its rows, their columns cannot take factors."""


@pytest.fixture(scope="module", params=BEHIND)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def model(name):
    source = open_checkpoint(checkpoint(name))
    return Model(build_decoder(source), source)


@pytest.mark.parametrize("fold", [equalised, rotated, both])
def test_folding_changes_no_logits(model, fold):
    folding = fold(model)
    assert_same(model.run(model.folded(folding))[0], model.run()[0])


def test_mixture_of_experts_is_equalised_but_not_rotated():
    source = open_checkpoint(checkpoint("qwen3_next_experts"))
    model = Model(build_decoder(source), source)
    folding = equalised(model)
    assert_same(model.run(model.folded(folding))[0], model.run()[0])
    experts = {name for name in folding.rows if ".mlp.gate." in name}
    assert not experts, "their router reads what they read"
    with pytest.raises(QuantizationError, match=r"post_attention_layernorm.* that only linear layers can absorb"):
        rotated(model)


def test_equalisation_skips_inputs_and_outputs_of_linear_attention(model, name):
    folding = equalised(model)
    left_alone = linear_weights(model.plan) - folding.rows.keys()
    behind = {weight for weight in linear_weights(model.plan) if BEHIND[name] in weight}
    assert behind
    assert behind <= left_alone
    before = {weight for weight in linear_weights(model.plan) if any(part in weight for part in BEFORE[name])}
    assert before <= folding.rows.keys()
    assert not before & folding.columns.keys()


def test_calibration_equals_a_session(model, name):
    """A window starts from an empty state."""
    planned = plan_checkpoint(checkpoint(name), {})
    tokens = np.random.default_rng(0).integers(0, planned.plan.vocab_size, 48)
    found = calibrate(planned.plan, planned.load, tokens, model=name)
    _, peaks = model.run(tokens=tokens)
    read = {node.inputs[0] for node in linear_nodes(planned.plan).values()}
    assert found.channel_peaks.keys() == read
    for value in read & peaks.keys():
        np.testing.assert_allclose(found.channel_peaks[value][:], peaks[value], rtol=1e-5, err_msg=value)
