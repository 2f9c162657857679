"""Names of an imported decoder's parts, after Hugging Face's names, which chunkrt's own decoders also use.

A node's name follows from its function and position, never from the exporter's names: the linear before attention is
named self_attn.qkv_proj in its layer. Schemes and placements refer to these names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import onnx_ir as ir

from chunkrt.graph.plan import DOMAIN
from chunkrt.onnx.importing.draft import Draft, producer

MIXERS = ("CachedAttention", "LinearAttention")
"""Operators of chunkrt's domain of which every layer has one."""

ACTIVATIONS = {"Relu": "relu", "Sigmoid": "silu_sigmoid", "Gelu": "gelu", "Tanh": "tanh", "Softplus": "softplus"}


RESIDUAL = "attention_residual"
"""Name of the residual stream between a layer's halves."""


class Words(NamedTuple):
    """Names of a layer's parts in a family of models."""

    before_mixer: str = "input_layernorm"
    before_mlp: str = "post_attention_layernorm"
    mlp: str = "mlp"
    last_norm: str = "norm"


LFM2 = Words("operator_norm", "ffn_norm", "feed_forward", "embedding_norm")
"""Names of a layer's parts in decoders with short convolutions."""


class ModuleNames(NamedTuple):
    """Path of a node's module, and the names of the node's outputs in the module."""

    path: str
    outputs: Sequence[str]


def name_nodes(draft: Draft) -> dict[ir.Node, ModuleNames]:
    """Return a place for every node. Requires: a pruned graph of the vocabulary. Ensures: no two outputs share a
    name."""
    nodes = list(draft.graph)
    mixers = [node for node in nodes if node.domain == DOMAIN and node.op_type in MIXERS]
    namer = _Namer(draft, LFM2 if any(_is_short_convolution(mixer) for mixer in mixers) else Words())
    for layer, mixer in enumerate(mixers):
        namer.name_mixer(mixer, f"model.layers.{layer}")
    layer = -1
    for node in nodes:
        if node in mixers:
            layer += 1
        namer.name(node, layer)
    return _unique(namer.places)


def _is_short_convolution(mixer: ir.Node) -> bool:
    kind = mixer.attributes.get("attn_type")
    return kind is not None and kind.value == "short_conv"


class _Namer:
    def __init__(self, draft: Draft, words: Words) -> None:
        self._words = words
        self.places: dict[ir.Node, ModuleNames] = {}
        self._weights = draft.weights
        self._has_rows = False  # True once the rows that get logits have been picked.

    def name_mixer(self, mixer: ir.Node, layer: str) -> None:
        """Name a layer's mixer, and the linears before and after it."""
        if mixer.op_type == "LinearAttention" and not _is_short_convolution(mixer):
            self._name_delta_rule(mixer, layer)
            return
        is_attention = mixer.op_type == "CachedAttention"
        path = f"{layer}.{'self_attn' if is_attention else 'conv'}"
        self.places[mixer] = ModuleNames(path, ["attention" if is_attention else "linear_attention"])
        read = mixer.inputs[0]
        if norm := producer(read, "HeadNorm", DOMAIN):
            self.places[norm] = ModuleNames(f"{path}.qk_norm", ["output"])
            read = norm.inputs[0]
        product = self._name_linear(read, f"{path}.{'qkv_proj' if is_attention else 'in_proj'}")
        if product and (norm := producer(product.inputs[0], "RMSNormalization")):
            self.places[norm] = ModuleNames(f"{layer}.{self._words.before_mixer}", ["output"])
        self._name_result(mixer.outputs[0], path, "o_proj" if is_attention else "out_proj")

    def _name_delta_rule(self, mixer: ir.Node, layer: str) -> None:
        """Name a recurrence, its inputs by row, and the norm of its heads."""
        path = f"{layer}.linear_attn"
        self.places[mixer] = ModuleNames(path, ["linear_attention"])
        qkv, decay, step = mixer.inputs[:3]
        product = self._name_linear(qkv, f"{path}.qkv_proj")
        if product and (norm := producer(product.inputs[0], "RMSNormalization")):
            self.places[norm] = ModuleNames(f"{layer}.{self._words.before_mixer}", ["output"])
        made = decay
        for op, name in (("Mul", "output"), ("Softplus", "softplus"), ("Add", "biased")):
            if found := producer(made, op):
                self.places[found] = ModuleNames(f"{path}.decay", [name])
                made = found.inputs[0]
        if sigmoid := producer(step, "Sigmoid"):
            self.places[sigmoid] = ModuleNames(f"{path}.step", ["output"])
        if split := producer(made, "Split"):
            self.places[split] = ModuleNames(path, ["b", "a"])
            self._name_linear(split.inputs[0], f"{path}.ba_proj")
        result = mixer.outputs[0]
        for user, _ in mixer.outputs[0].uses():
            if (user.domain, user.op_type) == (DOMAIN, "HeadNorm"):
                self.places[user] = ModuleNames(f"{path}.head_norm", ["output"])
                result = user.outputs[0]
        self._name_result(result, path, "out_proj")

    def _name_result(self, result: ir.Value, path: str, linear: str) -> None:
        """Return the linear after a mixer, and the gate between them if there is one."""
        for user, _ in result.uses():
            if user.op_type == "MatMul":
                self._name_linear(self._sum(user.outputs[0]), f"{path}.{linear}")
            elif user.op_type == "Mul" and user.inputs[1] not in self._weights:
                self.places[user] = ModuleNames(path, ["gated"])
                self._name_gate(next(value for value in user.inputs if value is not result), path)
                self._name_result(user.outputs[0], path, linear)

    def _name_gate(self, gate: ir.Value | None, path: str) -> None:
        """Return the factor of a mixer's result: the sigmoid or the SiLU of a linear."""
        silu, sigmoid = producer(gate, "Mul"), producer(gate, "Sigmoid")
        if silu is not None:
            self.places[silu] = ModuleNames(path, ["silu"])
            sigmoid = producer(silu.inputs[1], "Sigmoid")
        if sigmoid is not None:
            self.places[sigmoid] = ModuleNames(path, ["silu_sigmoid" if silu is not None else "sigmoid"])
            self._name_linear(sigmoid.inputs[0], f"{path}.{'z_proj' if silu is not None else 'gate_proj'}")

    def name(self, node: ir.Node, layer: int) -> None:
        """Name a node that has no name yet; `layer` is the layer of the last mixer before the node."""
        if node in self.places:
            return
        inside = f"model.layers.{layer}" if layer >= 0 else "model"
        if node.op_type == "Gather":
            is_embedding = node.inputs[0] in self._weights
            self._has_rows |= not is_embedding
            self.places[node] = (
                ModuleNames("model.embed_tokens", ["output"]) if is_embedding else ModuleNames("", ["last_hidden"])
            )
        elif self._has_rows:
            self._name_head(node)
        elif node.op_type == "RMSNormalization":
            self.places[node] = ModuleNames(self._norm(node, inside), ["output"])
        elif node.op_type == "MatMul":
            result = self._sum(node.outputs[0])
            is_gate_up = any(user.op_type == "Split" for user, _ in result.uses())
            self._name_linear(result, f"{inside}.{self._words.mlp}.{'gate_up_proj' if is_gate_up else 'down_proj'}")
        elif node.op_type == "Split":
            self.places[node] = ModuleNames(f"{inside}.{self._words.mlp}", ["gate", "up"])
        elif node.op_type == "Add" and node.inputs[1] not in self._weights:
            residual = ModuleNames(inside, [RESIDUAL])
            self.places[node] = ModuleNames(inside, ["output"]) if residual in self.places.values() else residual
        elif node.op_type == "Mul" and node.inputs[1] not in self._weights:
            is_silu = producer(node.inputs[1], "Sigmoid") is not None
            self.places[node] = ModuleNames(f"{inside}.{self._words.mlp}", ["silu" if is_silu else "gated"])
        else:
            self.places[node] = ModuleNames(
                f"{inside}.{self._words.mlp}", [ACTIVATIONS.get(node.op_type, node.op_type.lower())]
            )

    def _name_head(self, node: ir.Node) -> None:
        if node.op_type == "MatMul":
            self._name_linear(self._sum(node.outputs[0]), "lm_head")
        elif node.op_type == "Tanh":
            self.places[node] = ModuleNames("soft_cap", ["bounded"])
        elif node.op_type == "Mul":
            is_last = producer(node.inputs[0], "Tanh") is not None
            self.places[node] = ModuleNames("soft_cap.cap" if is_last else "soft_cap.inverse", ["output"])
        else:
            self.places[node] = ModuleNames("lm_head", [node.op_type.lower()])

    def _norm(self, node: ir.Node, layer: str) -> str:
        """Return the name of a norm in its layer, from its input and the earlier norms."""
        read = node.inputs[0]
        maker = read.producer() if read is not None else None
        place = self.places.get(maker) if maker is not None else None
        if place is None or layer == "model":
            return f"model.{self._words.last_norm}"
        if place.path.endswith((".o_proj", ".out_proj")):
            return f"{layer}.post_attention_layernorm"
        if place.path.endswith(".down_proj"):
            return f"{layer}.post_feedforward_layernorm"
        if place == ModuleNames(layer, [RESIDUAL]):
            has_post = any(found.path == f"{layer}.post_attention_layernorm" for found in self.places.values())
            return f"{layer}.{'pre_feedforward_layernorm' if has_post else self._words.before_mlp}"
        return f"model.{self._words.last_norm}"

    def _sum(self, product: ir.Value) -> ir.Value:
        """Name a product with its bias, if it has one."""
        users = [user for user, _ in product.uses()]
        if len(users) == 1 and users[0].op_type == "Add" and users[0].inputs[1] in self._weights:
            return users[0].outputs[0]
        return product

    def _name_linear(self, value: ir.Value | None, path: str) -> ir.Node | None:
        """Return the MatMul that makes a value, either directly or before the Add of its bias."""
        add = producer(value, "Add")
        if add is not None and add.inputs[1] in self._weights:
            self.places[add] = ModuleNames(path, ["output"])
            value = add.inputs[0]
        product = producer(value, "MatMul")
        if product is not None:
            self.places[product] = ModuleNames(path, ["output" if add is None else "product"])
        return product


def _unique(places: dict[ir.Node, ModuleNames]) -> dict[ir.Node, ModuleNames]:
    """Append numbers to equal names, which occur for parts that no family of chunkrt has."""
    seen: Counter[tuple[str, str]] = Counter()
    result = {}
    for node, (path, outputs) in places.items():
        count = max(seen[path, output] for output in outputs)
        seen.update((path, output) for output in outputs)
        if not count:
            result[node] = ModuleNames(path, outputs)
        elif outputs == ["output"]:  # a separate module, with its own weights
            result[node] = ModuleNames(f"{path}_{count + 1}", outputs)
        else:
            result[node] = ModuleNames(path, [f"{output}_{count + 1}" for output in outputs])
    return result
