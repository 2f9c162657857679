"""Report on the support for a checkpoint and on its unsupported features, from headers alone, without weights.

The report uses the code that loads and runs models: the mapping of names, the decoder family, the tokenizer, the
backends.
Unsupported features of a config are recorded and removed, and the rest is checked as if the config did not have them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from chunkrt.backends import Backend
from chunkrt.backends.coverage import (
    OperatorCoverage,
    RefusedSubgraph,
    available_backends,
    operators_of,
    refused_subgraphs,
)
from chunkrt.checkpoints.checkpoint import is_onnx, open_checkpoint
from chunkrt.checkpoints.gguf_names import architecture_names, find_architecture, is_known_name
from chunkrt.checkpoints.source import TensorSource
from chunkrt.errors import ModelError, UnsupportedModelError
from chunkrt.graph.decoders import describe_family, family_names, find_family, make_decoder, match_tensors
from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.linear_attention import LINEAR_ATTENTION_OP
from chunkrt.graph.modules import Module, Parameter
from chunkrt.graph.ops import trace
from chunkrt.graph.parallel import LinearBase
from chunkrt.graph.partition import check_new_plan, partition, unused_parameters
from chunkrt.graph.plan import ATTENTION_OPS, EXPERTS_OP, Node, Plan
from chunkrt.graph.rope import SCALING_KEY, rope_parameters
from chunkrt.onnx.exporting.forms import window_refusal
from chunkrt.onnx.importing import import_decoder
from chunkrt.tokenizer import Tokenizer

SHOWN_NAMES = 3
LONGEST_VALUE = 60
"""Maximum number of characters that are shown of a config's value."""

_SIZES = {
    "layers": ("block_count", "num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden size": ("embedding_length", "hidden_size", "n_embd", "d_model"),
    "heads": ("attention.head_count", "num_attention_heads", "n_head", "n_heads"),
    "context": ("context_length", "max_position_embeddings", "n_positions"),
}
"""Sizes that are reported for any model, with their keys in GGUF and in Hugging Face's config."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A feature that the config requires. `reason` states why the feature is not supported; empty if it is
    supported.
    """

    name: str
    asked: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """Match between the checkpoint's tensors and the decoder's parameters.

    Attributes:
        num_needed: number of tensors that the decoder needs; None if no decoder can be made.
        unread: tensors that the decoder does not read; without a decoder, tensors that no family's mapping contains.
        misfits: descriptions of tensors with a wrong shape.
        unused: parameters that the decoder's modules declare and that no operator reads.
        types: number of tensors of each stored type.
        unreadable: types that cannot be dequantised.
    """

    num_found: int
    num_needed: int | None
    missing: Sequence[str]
    unread: Sequence[str]
    misfits: Sequence[str]
    unused: Sequence[str]
    types: Mapping[str, int]
    unreadable: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class TokenizerKind:
    """The checkpoint's tokenizer. `model` is empty if the checkpoint has none. `reason` states why the tokenizer is not
    supported; empty if it is supported.
    """

    model: str
    pre_tokenizer: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class SupportReport:
    """A report on a checkpoint.

    Attributes:
        module: the family's source file; empty if the architecture is unknown.
        kind: "dense", "mixture" (of experts), "hybrid" (attention and linear attention), "recurrent" (only linear
            attention), a mixture of the latter two, or "new" if the architecture is unknown.
        known: the known architectures, nearest first.
        sizes: number of layers, hidden size and other sizes, if the header states them.
        unavailable: backends that are not available on this machine, with the reason; they do not count as missing.
    """

    path: str
    format: str
    architecture: str
    model_type: str
    module: str
    kind: str
    known: Sequence[str]
    sizes: Mapping[str, int]
    features: Sequence[Feature]
    tensors: Tensors
    tokenizer: TokenizerKind
    operators: Sequence[OperatorCoverage] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)
    refused_subgraphs: Sequence[RefusedSubgraph] = ()
    stages: Mapping[str, str] = field(default_factory=dict)
    """For each stage from the config to the export an empty string if it works, otherwise the reason."""

    @property
    def gaps(self) -> list[str]:
        """Return a short description of each missing feature; empty if the checkpoint can be run."""
        tensors = self.tensors
        gaps = [] if self.module else [f"architecture {self.architecture!r}"]
        gaps += [f"feature {feature.name}" for feature in self.features if feature.reason]
        if tensors.missing:
            gaps.append(f"in the checkpoint: {first_few(tensors.missing)}")
        if tensors.unread:
            gaps.append(f"a part that reads {first_few(tensors.unread)}")
        if tensors.misfits:
            gaps.append(f"a fitting shape: {first_few(tensors.misfits)}")
        if tensors.unused:
            gaps.append(f"a use of {first_few(tensors.unused)}, which the {describe_family(self.model_type)} declares")
        gaps += [f"dequantisation of {kind}" for kind in tensors.unreadable]
        if self.tokenizer.reason:
            gaps.append(f"tokenizer {' '.join((self.tokenizer.model, self.tokenizer.pre_tokenizer)).strip()}")
        for operator in self.operators:
            gaps += [f"{operator.name} on {backend}" for backend, reason in operator.refusals.items() if reason]
        if self.refused_subgraphs:
            gaps.append(f"on the NPU: {first_few([subgraph.name for subgraph in self.refused_subgraphs])}")
        return gaps

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary for JSON."""
        return asdict(self) | {"gaps": self.gaps}


def check_support(path: str | os.PathLike[str], *, backends: Sequence[Backend] | None = None) -> SupportReport:
    """Read a checkpoint's headers and report supported and missing features.

    Args:
        path: a GGUF file, a Hugging Face folder or an ONNX decoder, of any architecture.
        backends: backends to check, in addition to the NPU; by default all that are available on this machine.

    Raises:
        ModelError: `path` is not a checkpoint, or is damaged, or its config contradicts itself.
        UnsupportedModelError: the header cannot be read (another byte order, an unknown type, a part of a split file);
        or an ONNX decoder has an unsupported operator.
    """
    refusals: list[UnsupportedModelError] = []
    metadata: Mapping[str, Any] | None = None
    unmapped: list[str] = []
    source: TensorSource
    draft: _Draft | None
    if is_onnx(Path(path)):  # an ONNX decoder is imported completely, and unsupported parts raise an error
        source, decoder = import_decoder(Path(path))
        declared = model_type = source.architecture
        known, kind = list[str](), "ONNX"
        module = "chunkrt/onnx/importing"
        draft = _Draft.of(decoder, declared)
    else:
        source = open_checkpoint(path, refuse=refusals.append)
        metadata = getattr(source, "metadata", None)
        if metadata is None:
            declared, known, kind = source.architecture, list(family_names()), "safetensors"
            model_type = declared if declared in known else ""
        else:
            declared, known, kind = str(metadata.get("general.architecture")), architecture_names(), "GGUF"
            known_type = find_architecture(declared).model_type if declared in known else ""
            model_type = str(source.config.get("model_type", known_type)) if known_type else ""
        keys = metadata or {}
        unmapped = [refusal.feature for refusal in refusals if refusal.feature and refusal.feature not in keys]
        refusals = [refusal for refusal in refusals if refusal.feature in keys or (model_type and not refusal.feature)]
        family = find_family(model_type)
        module = family.build.__module__.replace(".", "/") + ".py" if family else ""
        draft = _draft(source, refusals) if model_type and source.config else None
    available, unavailable = available_backends() if backends is None and draft else (backends or (), {})
    report = SupportReport(
        path=str(path),
        format=kind,
        architecture=declared,
        model_type=model_type,
        module=module,
        kind=_kind(draft.plan) if draft else "new",
        known=sorted(known, key=lambda name: -SequenceMatcher(None, declared, name).ratio()),
        sizes=_sizes(source, declared, metadata),
        features=[
            *(_features(draft.config, draft, refusals) if draft and draft.config else ()),
            *(_refused(r, source, metadata or {}) for r in refusals),
        ],
        tensors=_tensors(source, draft, unmapped),
        tokenizer=_tokenizer(source, metadata),
        operators=operators_of(draft.plan, available) if draft else (),
        unavailable=unavailable,
        refused_subgraphs=refused_subgraphs(draft.plan) if draft else (),
    )
    return replace(report, stages=_stages(report, draft.plan if draft else None, _has_template(source)))


def _kind(plan: Plan) -> str:
    ops = {node.op for subgraph in plan.subgraphs for node in subgraph.nodes}
    is_linear, is_mixture = LINEAR_ATTENTION_OP in ops, EXPERTS_OP in ops
    mixer = "" if not is_linear else "hybrid" if ops & set(ATTENTION_OPS) else "recurrent"
    return " ".join(filter(None, (mixer, "mixture" if is_mixture else ""))) or "dense"


def _has_template(source: TensorSource) -> bool:
    try:
        tokenizer = Tokenizer.from_source(source)
    except ModelError:
        return False
    return tokenizer is not None and tokenizer.has_chat_template


def _stages(report: SupportReport, plan: Plan | None, has_template: bool) -> dict[str, str]:
    """Return the reason why each stage does not work; empty if it works."""
    tensors, refused = report.tensors, [feature for feature in report.features if feature.reason]
    odd = [*tensors.missing, *tensors.unread, *tensors.misfits, *tensors.unreadable]
    stages = {
        "config": "" if report.module and not refused else refused[0].reason if refused else "not known",
        "tensors": first_few(odd) if odd else "" if plan else "not known",
        "tokenizer": report.tokenizer.reason or ("" if report.tokenizer.model else "the model has none"),
        "template": "" if has_template else "the model has none",
        "graph": "not built" if plan is None else first_few(tensors.unused),
    }
    names = {name for operator in report.operators for name in operator.refusals}
    for backend in ("reference", "native", "onnxrt"):
        reasons = [f"{o.name}: {o.refusals[backend]}" for o in report.operators if o.refusals.get(backend)]
        if backend in names:
            stages[backend] = first_few(reasons)
    if plan is not None:
        stages["NPU"] = first_few([f"{one.node}: {one.reason}" for one in report.refused_subgraphs])
        stages["export"] = window_refusal(plan)
    return stages


@dataclass(frozen=True, kw_only=True)
class _Draft:
    """Report on a checkpoint without its refused features. `config` is the family's config; None for an ONNX
    decoder.
    """

    config: DecoderConfig | None
    decoder: Module
    plan: Plan
    unused: Sequence[Parameter]

    @staticmethod
    def of(decoder: Module, family: str, config: DecoderConfig | None = None) -> _Draft:
        """Trace and plan a decoder."""
        graph = trace(decoder, title=describe_family(family))
        unused = unused_parameters(decoder, graph)
        plan = partition(graph, family=family)
        check_new_plan(plan)
        return _Draft(config=config, decoder=decoder, plan=plan, unused=unused)


def _draft(source: TensorSource, refusals: list[UnsupportedModelError]) -> _Draft | None:
    """Build the decoder, removing one refused key after the other from the config; return None if it cannot be
    built.
    """
    source = copy(source)
    while True:
        try:
            decoder, config = make_decoder(source)
            return _Draft.of(decoder, source.architecture, config)
        except UnsupportedModelError as refusal:
            refusals.append(refusal)
            left_out = {refusal.feature} | ({"rope_parameters"} if refusal.feature == SCALING_KEY else set())
        except ModelError:
            if refusals:
                return None  # the config may be valid with the removed keys
            raise
        config_left = {key: value for key, value in source.config.items() if key not in left_out}
        if len(config_left) == len(source.config):
            return None
        source.config = config_left


def _sizes(source: TensorSource, declared: str, metadata: Mapping[str, Any] | None) -> dict[str, int]:
    """Return sizes by the names of `_SIZES`, if they are whole numbers."""
    if metadata is not None:
        given = {key.removeprefix(f"{declared}."): metadata[key] for key in metadata if key.startswith(f"{declared}.")}
    else:
        section = source.config.get("text_config")
        given = {**(section if isinstance(section, Mapping) else {}), **source.config}
    found = {name: next((given[key] for key in keys if key in given), None) for name, keys in _SIZES.items()}
    return {name: value for name, value in found.items() if type(value) is int}


def _num_experts(plan: Plan, node: Node) -> str:
    return f"{node.attributes['top_k']} of {plan.tensors[node.inputs[2]].shape[0]}"


def _features(config: DecoderConfig, draft: _Draft, refusals: Sequence[UnsupportedModelError]) -> Iterator[Feature]:
    """List the features of the config that the decoder supports, without refused features."""
    plan = draft.plan
    nodes = [node for subgraph in plan.subgraphs for node in subgraph.nodes]
    windows = [node.attributes["window"] for node in nodes if node.op in ATTENTION_OPS]
    kinds = (str(node.attributes["attn_type"]) for node in nodes if node.op == "LinearAttention")
    mixers = Counter(kind for kind in kinds if kind != "silu_conv")  # a part of Mamba's mixer
    mixers["mamba"] = sum(node.op == "SelectiveScan" for node in nodes)
    experts = [node for node in nodes if node.op == "RoutedExperts"]
    tensors = [name for parameter in draft.decoder.parameters() for name in parameter.checkpoint_tensors]
    biases = dict.fromkeys(name.split(".")[-2] for name in tensors if name.endswith(".bias"))
    layers = {"attention": len(windows), **mixers}
    num_windows = sum(1 for window in windows if window)
    asked = {
        "layer_types": ", ".join(f"{count} {kind}" for kind, count in layers.items() if count),
        "hidden_act": config.activation,
        "sliding_window": f"{plan.window} tokens in {num_windows} layers" if num_windows else "",
        SCALING_KEY: ", ".join(_rope_rules(config)),
        "final_logit_softcapping": str(config.raw.get("final_logit_softcapping") or ""),
        "num_experts": _num_experts(plan, experts[0]) if experts else "",
        "biases": ", ".join(biases),
        "tie_word_embeddings": "yes"
        if any(isinstance(m, LinearBase) and m.tied_to for m in draft.decoder.modules())
        else "",
    }
    refused = {refusal.feature for refusal in refusals}
    return (Feature(name=name, asked=value) for name, value in asked.items() if value and name not in refused)


def _rope_rules(config: DecoderConfig) -> Iterator[str]:
    """Describe RoPE's scaling rules, by kind of layer if they differ, and a GGUF's tensor of scaling factors if
    present.
    """
    sections = {kind: value for kind, value in (config.raw.get("rope_parameters") or {}).items() if value}
    if any(isinstance(section, Mapping) for section in sections.values()):
        rules = {kind: rope_parameters({"rope_parameters": section})["rope_type"] for kind, section in sections.items()}
        yield from (f"{rule} in {kind}" for kind, rule in rules.items() if rule != "default")
        return
    if (rule := rope_parameters(config.raw)["rope_type"]) != "default":
        yield str(rule)
    if config.rope_divisor:
        yield config.rope_divisor


def _refused(refusal: UnsupportedModelError, source: TensorSource, metadata: Mapping[str, Any]) -> Feature:
    name, config = refusal.feature, source.config
    value = metadata.get(name, config.get(name))
    if value is None and name == SCALING_KEY:
        value = config.get("rope_parameters")
    reason = str(refusal).removeprefix(f"{source.path}: ").removeprefix(f"{source.path.name}: ")
    return Feature(name=name or "config", asked="" if value is None else str(value)[:LONGEST_VALUE], reason=reason)


def _tensors(source: TensorSource, draft: _Draft | None, unmapped: Sequence[str]) -> Tensors:
    names = source.names()
    info = {name: source.info(name) for name in names}
    types = dict(Counter(each.stored_as for each in info.values()))
    unreadable = sorted({each.stored_as for each in info.values() if not each.is_readable})
    missing: Mapping[str, str] = {}
    num_needed, misfits, unused = None, dict[str, None](), list[str]()
    if draft is None:
        unread = [name for name in names if not is_known_name(name)]
    else:
        unused = [parameter.name for parameter in draft.unused]
        parameters = [parameter for parameter in draft.decoder.parameters() if parameter.name not in unused]
        missing, unread = match_tensors(parameters, source)
        num_needed = len({name for p in parameters for name in p.checkpoint_tensors})
        present = (p for p in parameters if missing.keys().isdisjoint(p.checkpoint_tensors))
        misfits = dict.fromkeys(misfit for parameter in present if (misfit := parameter.misfit(source)))
    return Tensors(
        num_found=len(names) + (len(unmapped) if draft else 0),
        num_needed=num_needed,
        missing=list(missing),
        unread=[*unmapped, *unread],
        misfits=list(misfits),
        unused=unused,
        types=types,
        unreadable=unreadable,
    )


def _tokenizer(source: TensorSource, metadata: Mapping[str, Any] | None) -> TokenizerKind:
    """Describe the tokenizer. It is also loaded, to detect a damaged tokenizer."""
    try:
        if metadata is not None:
            from chunkrt.tokenizer.gguf_vocabulary import read_kind

            model, pre = read_kind(metadata) or ("", "")
            Tokenizer.from_source(source)  # checks that its tables are complete
            return TokenizerKind(model=model, pre_tokenizer=pre)
        from chunkrt.tokenizer.huggingface_folder import read_folder

        if (found := read_folder(source.path, source.config)) is None:
            return TokenizerKind(model="", pre_tokenizer="")
        library, _ = found
        Tokenizer(*found)  # checks that its decoder is implemented
        pre = type(library.pre_tokenizer).__name__ if library.pre_tokenizer else ""
        return TokenizerKind(model=type(library.model).__name__, pre_tokenizer=pre)
    except UnsupportedModelError as refusal:
        model, pre = (str((metadata or {}).get(f"tokenizer.ggml.{key}", "")) for key in ("model", "pre"))
        return TokenizerKind(model=model, pre_tokenizer=pre, reason=str(refusal))
    except ModelError as error:
        where = f"{source.path}: "
        raise ModelError(where + str(error).removeprefix(where)) from error


def first_few(names: Sequence[str]) -> str:
    """Join names in one line, with the number of omitted ones."""
    num_more = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {num_more} more" if num_more > 0 else "")
