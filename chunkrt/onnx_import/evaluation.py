"""Running parts of a foreign graph under ONNX Runtime, to learn what they say instead of guessing it.

Masks, positions and sizes depend on nothing but how many tokens are past and how many come: a few probes show what
they are. So any arithmetic that an exporter may have made of them is understood, or refused by its values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from chunkrt.errors import ModelError
from chunkrt.onnx_import.signature import Probe, Signature, feeds

PROBES = (Probe(0, 1), Probe(0, 6), Probe(5, 1), Probe(5, 3), Probe(19, 7))
"""A first chunk, a lone token, and a chunk after others; sizes that no tensor has by chance."""


class Evaluator:
    """A foreign model as it was read, of which any value can be had.

    Args:
        proto: its external data stay in their files, in `folder`.
    """

    def __init__(self, proto: onnx.ModelProto, folder: Path, signature: Signature) -> None:
        self._proto, self._folder, self._signature = proto, folder, signature
        self._nodes = list(proto.graph.node)
        self._writers = {name: node for node in proto.graph.node for name in node.output if name}
        self._initializers = {tensor.name: tensor for tensor in proto.graph.initializer}

    @cached_property
    def _inputs(self) -> dict[str, ir.Value]:
        values = (ir.serde.deserialize_value_info_proto(v, None) for v in self._proto.graph.input)
        return {v.name or "": v for v in values}

    def is_positional(self, name: str) -> bool:
        """Whether a value of the model as it was read depends on sizes, masks and positions alone.

        That is: not on tokens, nor on what is cached.
        """
        return name in self._known and name not in self._data

    def probe(self, name: str, probes: Sequence[Probe] = PROBES) -> list[NDArray[Any]]:
        """A positional value at each probe.

        Raises:
            ModelError: ONNX Runtime cannot run what it is made of.
        """
        session, read = self._session(name)
        inputs = {n: value for n, value in self._inputs.items() if n in read}
        return [_run(session, [name], feeds(self._signature, inputs, probe))[0] for probe in probes]

    def run(self, names: Sequence[str], probe: Probe) -> dict[str, NDArray[Any]]:
        """Several values of any kind at one probe, for token 0 everywhere and states of zeros.

        Raises:
            ModelError: ONNX Runtime cannot run what they are made of.
        """
        if not names:
            return {}
        session, read = self._session(*names)
        inputs = {n: value for n, value in self._inputs.items() if n in read}
        return dict(zip(names, _run(session, names, feeds(self._signature, inputs, probe)), strict=True))

    def constant(self, name: str) -> NDArray[Any]:
        """A value that depends on no input at all. Raises ModelError as `probe` does."""
        session, _ = self._session(name)
        return _run(session, [name], {})[0]

    @cached_property
    def _known(self) -> set[str]:
        return {*self._writers, *self._initializers, *(v.name for v in self._proto.graph.input)}

    @cached_property
    def _data(self) -> set[str]:
        """Values that depend on tokens or states by more than their shapes."""
        data = {self._signature.tokens, *self._signature.states}
        for node in self._proto.graph.node:
            if node.op_type not in ("Shape", "Size") and (data.intersection(node.input) or _has_subgraph(node)):
                data.update(name for name in node.output if name)
        return data

    @cached_property
    def constants(self) -> set[str]:
        """Values that depend on no input."""
        known = set(self._initializers)
        for node in self._proto.graph.node:
            if known.issuperset(n for n in node.input if n) and not _has_subgraph(node):
                known.update(name for name in node.output if name)
        return known

    def _session(self, *names: str) -> tuple[Any, set[str]]:
        """A session that makes some values, and the inputs that it reads."""
        needed: set[str] = set()
        pending = list(names)
        while pending:
            if (value := pending.pop()) not in needed:
                needed.add(value)
                if value in self._writers:
                    pending += [n for n in self._writers[value].input if n]
        graph = onnx.GraphProto(name="probe")
        graph.node.extend(node for node in self._nodes if any(name in needed for name in node.output))
        graph.initializer.extend(tensor for n, tensor in self._initializers.items() if n in needed)
        graph.input.extend(v for v in self._proto.graph.input if v.name in needed and v.name not in self._initializers)
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
        model = onnx.ModelProto(ir_version=self._proto.ir_version, graph=graph)
        model.opset_import.extend(self._proto.opset_import)
        model.functions.extend(self._proto.functions)
        try:
            return open_session(model.SerializeToString(), self._folder), needed
        except Exception as error:  # onnxruntime raises a dozen unrelated types
            raise ModelError(f"ONNX Runtime cannot make {names[0]!r} of this model: {reason_of(error)}") from error


def _has_subgraph(node: onnx.NodeProto) -> bool:
    """Whether it holds graphs of its own, which may read any value."""
    return any(a.HasField("g") or a.graphs for a in node.attribute)


def _run(session: Any, names: Sequence[str], given: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    try:
        return list(session.run(list(names), dict(given)))
    except Exception as error:  # onnxruntime raises a dozen unrelated types
        raise ModelError(f"ONNX Runtime cannot make {names[0]!r} of this model: {reason_of(error)}") from error


def reason_of(error: Exception) -> str:
    """What ONNX Runtime says, in one line."""
    return " ".join(str(error).split())[:300]


def open_session(model: bytes, folder: Path) -> Any:
    """An inference session of a serialised model whose external data are in `folder`."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")  # float32, not int8, activations
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
