"""Foldings of decoders with other structures, and with linear attention, whose channels are not changed."""

import re

import numpy as np
import pytest
from fixture_checkpoints import checkpoint
from folding_models import (
    DOWN,
    GATE_UP,
    LAYER,
    O_PROJ,
    QKV,
    Model,
    assert_same,
    both,
    equalised,
    rotated,
    unusual_model,
)

from chunkrt.checkpoints.checkpoint import open_checkpoint
from chunkrt.compile.calibrate import calibrate
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.errors import QuantizationError
from chunkrt.graph import ops
from chunkrt.graph.decoders import build_decoder
from chunkrt.graph.decoders.llama import CausalDecoder, FeedForward, Layer
from chunkrt.graph.modules import RMSNorm
from chunkrt.graph.ops import current_trace
from chunkrt.graph.parallel import ReplicatedLinear
from chunkrt.graph.plan import linear_nodes, linear_weights


class SandwichLayer(Layer):
    """Gemma's layer: the output of a feed-forward is normalised before it is added."""

    def __init__(self, config, *parts):
        super().__init__(config, *parts)
        self.after = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden):
        hidden = ops.add(hidden, self.self_attn(self.input_layernorm(hidden)), name="attention_residual")
        return ops.add(hidden, self.after(self.mlp(self.post_attention_layernorm(hidden))), name="output")


class ScaledLayer(Layer):
    """A layer whose stream passes through a sigmoid."""

    def forward(self, hidden):
        return ops.sigmoid(super().forward(hidden), name="squashed")


class ParallelLayer(Layer):
    """A layer whose attention and feed-forward read one norm, and whose stream gets a bias."""

    def forward(self, hidden):
        normed = self.input_layernorm(hidden)
        both = ops.add(self.self_attn(normed), self.mlp(normed), name="both")
        bias = self.post_attention_layernorm.weight.value()
        return ops.add(ops.add(hidden, both, name="residual"), bias, name="output")


class NormAddedLayer(Layer):
    """A layer that adds a normalised value to the stream."""

    def forward(self, hidden):
        hidden = ops.add(hidden, self.self_attn(self.input_layernorm(hidden)), name="attention_residual")
        normed = self.post_attention_layernorm(hidden)
        return ops.add(normed, self.mlp(normed), name="output")


class SharedWeightLayer(Layer):
    """A layer that uses o_proj twice."""

    def forward(self, hidden):
        attended = self.self_attn(self.input_layernorm(hidden))
        *_, product, _ = current_trace().nodes  # and its bias
        again = ops.matmul(product.inputs[0], self.self_attn.o_proj.weight.value(), name="again")
        hidden = ops.add(hidden, ops.add(attended, again, name="both"), name="attention_residual")
        return ops.add(hidden, self.mlp(self.post_attention_layernorm(hidden)), name="output")


class SeparateFeedForward(FeedForward):
    """Gate and up as separate linears, up on the left, biases, and a gate with one more reader."""

    def __init__(self, config, *, reads_up_twice):
        super().__init__(config)
        self.gate_proj = ReplicatedLinear(config.hidden_size, config.intermediate_size, bias=True)
        self.up_proj = ReplicatedLinear(config.hidden_size, config.intermediate_size, bias=True)
        self.reads_up_twice = reads_up_twice

    def forward(self, hidden):
        gate, up = self.gate_proj(hidden), self.up_proj(hidden)
        gated = ops.mul(up, ops.sigmoid(gate), name="gated")
        return self.down_proj(
            ops.mul(gated, ops.sigmoid(up, name="of_up"), name="twice") if self.reads_up_twice else gated
        )


class HeadlessDecoder(CausalDecoder):
    """Returns the last hidden states, as embedding models do."""

    def forward(self, token_ids, logit_rows):
        return ops.gather_rows(self.model(token_ids), logit_rows, name="last_hidden")


class BareDecoder(CausalDecoder):
    """Returns embeddings directly after the look-up."""

    def forward(self, token_ids, logit_rows):
        return ops.gather_rows(self.model.embed_tokens(token_ids), logit_rows, name="picked")


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (SandwichLayer, f"node '{LAYER}.after.output' (RMSNormalization) makes a part of it"),
        (ScaledLayer, f"node '{LAYER}.squashed' (Sigmoid) reads it"),
        (NormAddedLayer, f"node '{LAYER}.post_attention_layernorm.output' (RMSNormalization) has a weight that only"),
        (SharedWeightLayer, f"(MatMul) reads {O_PROJ}, which other nodes read too"),
    ],
)
def test_decoder_that_cannot_be_rotated_is_refused(layer, message):
    with pytest.raises(QuantizationError, match=f"^the residual stream cannot be rotated: .*{re.escape(message)}"):
        rotated(unusual_model(layer))


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (
            HeadlessDecoder,
            "node 'model.norm.output' (RMSNormalization) has a weight that only linear layers can absorb",
        ),
        (BareDecoder, "node 'picked' (Gather) makes it the decoder's output"),
    ],
)
def test_output_without_a_head_is_not_rotated(decoder, message):
    with pytest.raises(QuantizationError, match=re.escape(message)):
        rotated(unusual_model(decoder=decoder))


@pytest.mark.parametrize("fold", [equalised, rotated, both])
def test_norm_that_several_linears_read_is_shared(fold):
    model = unusual_model(ParallelLayer)
    folding = fold(model)
    assert_same(model.run(model.folded(folding))[0], model.run()[0])
    if fold is not rotated:
        np.testing.assert_array_equal(folding.rows[QKV], folding.rows[GATE_UP])


@pytest.mark.parametrize(
    ("layer", "left_alone"),
    [
        (SandwichLayer, set()),
        (NormAddedLayer, {"gate_up_proj"}),
        (SharedWeightLayer, {"o_proj"}),
    ],
)
def test_linears_without_a_source_are_unchanged(layer, left_alone):
    model = unusual_model(layer)
    folding = equalised(model)
    alone = {name.split(".")[-2] for name in linear_nodes(model.plan).keys() - folding.rows.keys()}
    assert alone == left_alone
    assert_same(model.run(model.folded(folding))[0], model.run()[0])


@pytest.mark.parametrize("reads_up_twice", [False, True])
def test_gate_and_up_may_be_separate_linears(reads_up_twice):
    model = unusual_model(feed_forward=lambda config: SeparateFeedForward(config, reads_up_twice=reads_up_twice))
    folding = equalised(model)
    assert_same(model.run(model.folded(folding))[0], model.run()[0])
    assert (DOWN in folding.rows) != reads_up_twice
    np.testing.assert_array_equal(
        folding.rows[f"{LAYER}.mlp.gate_proj.weight"], folding.rows[f"{LAYER}.mlp.up_proj.weight"]
    )
    assert (f"{LAYER}.mlp.up_proj.bias" in folding.columns) != reads_up_twice
    assert_same(model.run(model.folded(both(model)))[0], model.run()[0])


BEHIND = {"lfm2": ".conv.out_proj.", "qwen3_next": ".linear_attn.out_proj.", "qwen3_5": ".linear_attn.out_proj."}
BEHIND |= dict.fromkeys(("bamba", "falcon_h1"), ".mamba.out_proj.")
"""Linears whose input comes from linear attention."""
BEFORE = {"lfm2": (".conv.in_proj.",), "qwen3_next": (".linear_attn.qkv_proj.", ".linear_attn.ba_proj.")}
BEFORE["qwen3_5"] = BEFORE["qwen3_next"]
BEFORE |= dict.fromkeys(("bamba", "falcon_h1"), (".mamba.cbx_proj.", ".mamba.dt_proj."))
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
