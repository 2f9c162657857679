"""Per-layer embeddings: every layer adds a value that depends on the token's id, and on the token's embedding.

    input of layer l = (row l of the token in a second table + norm(projection of the embedding)) / sqrt(2)
    output           = hidden + norm(up(activation(down(hidden)) * input))

The second table is as large as the decoder, but a token needs a single row of it, which the CPU looks up. Source:
Hugging Face's `Gemma4TextModel.get_per_layer_inputs`, `project_per_layer_inputs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from chunkrt.errors import ModelError
from chunkrt.graph import ops
from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.decoders.llama import Body, Layer, LayerNames, activate, norm
from chunkrt.graph.modules import Constant, Embedding, HeadNorm, Module
from chunkrt.graph.parallel import ColumnParallelLinear, ReplicatedLinear
from chunkrt.graph.rope import RotaryTables


def input_width(config: DecoderConfig) -> int:
    """Return the number of columns of each layer's input; 0 if the layers take no input."""
    return config.count("hidden_size_per_layer_input", 0, least=0)


class LayerWithInput(Layer):
    """A layer that adds a value of its input to the residual stream, if the config has such inputs.

    `input_residual` names this sum in the plan.
    """

    residuals = ("attention_residual", "mlp_residual")
    input_residual = "output"

    def __init__(self, config: DecoderConfig, mixer: Module, mlp: Module, *, names: LayerNames) -> None:
        super().__init__(config, mixer, mlp, names=names)
        self._activation = config.activation
        if width := input_width(config):
            self.per_layer_input_gate = ReplicatedLinear(config.hidden_size, width)
            self.per_layer_projection = ReplicatedLinear(width, config.hidden_size)
            self.post_per_layer_input_norm = norm(config)

    def forward(self, hidden: ir.Value, *inputs: ir.Value) -> ir.Value:
        hidden = super().forward(hidden)
        if not inputs:
            return hidden
        active = activate(self.per_layer_input_gate(hidden), self._activation)
        own = self.per_layer_projection(ops.mul(active, inputs[0], name="gated_input"))
        return ops.add(hidden, self.post_per_layer_input_norm(own), name=self.input_residual)


class BodyWithInputs(Body):
    """A body that computes the inputs of its layers, if the config has such inputs.

    Raises:
        ModelError: the second table has too few rows.
    """

    def __init__(
        self,
        config: DecoderConfig,
        rope: RotaryTables,
        layers: Sequence[Module],
        *,
        embedding_scale: float,
        other_ropes: Mapping[str, RotaryTables],
    ) -> None:
        super().__init__(config, rope, layers, embedding_scale=embedding_scale, other_ropes=other_ropes)
        self._has_inputs = (width := input_width(config)) > 0
        if not width:
            return
        columns, num_rows = len(layers) * width, config.count("vocab_size_per_layer_input")
        if num_rows < config.vocab_size:
            raise ModelError(
                f"{config.where}: vocab_size_per_layer_input is {num_rows}, but vocab_size is {config.vocab_size}"
            )
        self.embed_tokens_per_layer = Embedding(num_rows, columns, scale=width**0.5, ranks=config.ranks)
        factor = config.hidden_size**-0.5
        self.per_layer_model_projection = ColumnParallelLinear(
            config.hidden_size, columns, config.ranks, factor=factor, gathers=True
        ).to("cpu")
        parts = {"per_layer_projection_norm": len(layers)}
        self.per_layer_projection_norm = HeadNorm(parts, width, config.rms_norm_eps)
        self.per_layer_inputs = LayerInputs(len(layers), columns).to("cpu")

    def layer_inputs(self, token_ids: ir.Value, embeddings: ir.Value) -> Sequence[tuple[ir.Value, ...]]:
        if not self._has_inputs:
            return ()
        rows = self.embed_tokens_per_layer(token_ids)
        projected = self.per_layer_projection_norm(self.per_layer_model_projection(embeddings))
        with self.per_layer_inputs.scope():
            return [(one,) for one in self.per_layer_inputs.split(projected, rows)]


class LayerInputs(Module):
    """The sum of both terms, divided by sqrt(2) and cut into the inputs of the layers."""

    def __init__(self, num_layers: int, columns: int) -> None:
        super().__init__()
        self._num_layers, self.factor = num_layers, Constant(np.full(columns, 2**-0.5, np.float32))

    def split(self, projected: ir.Value, rows: ir.Value) -> Sequence[ir.Value]:
        """Return the input of each layer. Call this in the module's scope."""
        total = ops.mul(ops.add(projected, rows, name="sum"), self.factor(), name="output")
        if self._num_layers == 1:
            return [total]
        return ops.split_columns(total, names=[f"of_layer_{index}" for index in range(self._num_layers)])
