"""The contenders, as data: a runtime, a form of the model, and options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

ENGINES = {
    "chunkrt": "chunkrt",
    "llama.cpp": "llama_cpp",
    "onnxruntime-genai": "onnx_genai",
    "openvino-genai": "openvino_genai",
    "ctranslate2": "ctranslate2",
    "torch": "torch",
}
"""Kinds of contenders, and the modules in `engines` that run them."""

PACKAGES = {
    "llama_cpp": ("llama-cpp-python",),
    "gguf": ("gguf",),
    "hugging_face": ("accelerate", "gguf", "torch", "transformers"),
    "onnx_genai": ("onnx", "onnx-ir", "onnxruntime", "onnxruntime-genai", "torch", "transformers"),
    "openvino_genai": ("openvino-genai",),
    "openvino_nncf": ("nncf", "openvino-genai"),
    "ctranslate2": ("ctranslate2", "torch", "transformers"),
    "torch": ("torch", "transformers"),
}
"""Packages of `requirements.txt` that each module in `engines` imports."""

PEERS = tuple(kind for kind in ENGINES if kind != "chunkrt")


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form of the model: converted by `engines/<engine>.py` from another form."""

    engine: str
    of: str = "checkpoint"
    options: Mapping[str, Any] = field(default_factory=dict)


FORMS = {
    **{f"{kind}.gguf": Form(engine="gguf", options={"type": kind}) for kind in ("F16", "Q8_0", "Q4_0")},
    "hugging-face": Form(engine="hugging_face"),
    "onnx-fp32": Form(engine="onnx_genai", of="hugging-face", options={"precision": "fp32", "prune_lm_head": "true"}),
    "onnx-int4": Form(
        engine="onnx_genai",
        of="hugging-face",
        options={"precision": "int4", "prune_lm_head": "true", "int4_accuracy_level": 4, "int4_block_size": 32},
    ),
    "openvino-w8a8": Form(engine="openvino_nncf", of="F16.gguf"),
    "ctranslate2-int8": Form(engine="ctranslate2", of="hugging-face", options={"quantization": "int8"}),
}
"""Forms by name, which is also the name of the file or folder. "checkpoint" is the given GGUF file."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One row of the table.

    kind: a key of ENGINES.
    form: a key of FORMS, or "checkpoint".
    options: arguments of the engine's `Runner`.
    engine_folder: folder of its engine in `engines`: "serving" for many prompts at once, "scoring" for scoring.
    module: its engine, if the kind does not determine it.
    """

    name: str
    kind: str
    form: str = "checkpoint"
    options: Mapping[str, Any] = field(default_factory=dict)
    engine_folder: str = ""
    module: str | None = None

    @property
    def engine(self) -> str:
        """Its module in `engines`."""
        return ".".join(filter(None, [self.engine_folder, self.module or ENGINES[self.kind]]))


CONTENDERS = (
    Contender(name="chunkrt 8-bit", kind="chunkrt"),
    Contender(name="chunkrt 4-bit", kind="chunkrt", options={"scheme": "w4a8-dynamic"}),
    *(Contender(name=f"llama.cpp {t}", kind="llama.cpp", form=f"{t}.gguf") for t in ("Q8_0", "Q4_0", "F16")),
    *(
        Contender(name=f"ONNX Runtime GenAI {precision}", kind="onnxruntime-genai", form=f"onnx-{precision}")
        for precision in ("int4", "fp32")
    ),
    *(
        Contender(
            name=f"OpenVINO GenAI {t}, {attention}",
            kind="openvino-genai",
            form=f"{t}.gguf",
            options={"ATTENTION_BACKEND": backend},
        )
        for t in ("Q8_0", "Q4_0", "F16")
        for attention, backend in (("paged", "PA"), ("plain", "SDPA"))
    ),
    Contender(
        name="OpenVINO GenAI W8A8 by NNCF, paged",
        kind="openvino-genai",
        form="openvino-w8a8",
        options={"ATTENTION_BACKEND": "PA"},
    ),
    Contender(
        name="CTranslate2 int8", kind="ctranslate2", form="ctranslate2-int8", options={"compute_type": "int8_float32"}
    ),
    *(
        Contender(name=f"PyTorch dynamic int8, {engine}", kind="torch", form="hugging-face", options={"engine": engine})
        for engine in ("fbgemm", "onednn")
    ),
)
"""chunkrt's come first: ratios divide their rates by the others'."""

SERVERS = (
    Contender(name="chunkrt 8-bit", kind="chunkrt", engine_folder="serving"),
    Contender(name="chunkrt 4-bit", kind="chunkrt", options={"scheme": "w4a8-dynamic"}, engine_folder="serving"),
    Contender(name="llama.cpp Q8_0", kind="llama.cpp", form="Q8_0.gguf", engine_folder="serving"),
    Contender(name="llama.cpp, file as given", kind="llama.cpp", engine_folder="serving"),
    Contender(name="OpenVINO GenAI Q8_0", kind="openvino-genai", form="Q8_0.gguf", engine_folder="serving"),
    Contender(name="OpenVINO GenAI, file as given", kind="openvino-genai", engine_folder="serving"),
    Contender(
        name="CTranslate2 int8",
        kind="ctranslate2",
        form="ctranslate2-int8",
        options={"compute_type": "int8_float32"},
        engine_folder="serving",
    ),
)
"""Contenders that answer many prompts at once."""

CONVERSING = (
    *(
        Contender(name=f"chunkrt, {place}", kind="chunkrt", options={"prefix_cache": place}, engine_folder="serving")
        for place in ("off", "memory")
    ),
    *(
        Contender(
            name=f"OpenVINO GenAI Q8_0, {'with' if caches else 'without'} prefix caching",
            kind="openvino-genai",
            form="Q8_0.gguf",
            options={"enable_prefix_caching": caches},
            engine_folder="serving",
        )
        for caches in (False, True)
    ),
    *(
        Contender(
            name=f"llama.cpp Q8_0, {cache}",
            kind="llama.cpp",
            form="Q8_0.gguf",
            options={"cache": option},
            engine_folder="serving",
            module="llama_cpp_cached",
        )
        for cache, option in (("no cache", "none"), ("LlamaRAMCache", "ram"), ("LlamaDiskCache", "disk"))
    ),
    Contender(
        name="OpenVINO GenAI, file as given, with prefix caching",
        kind="openvino-genai",
        options={"enable_prefix_caching": True},
        engine_folder="serving",
    ),
    Contender(
        name="llama.cpp, file as given, LlamaRAMCache",
        kind="llama.cpp",
        options={"cache": "ram"},
        engine_folder="serving",
        module="llama_cpp_cached",
    ),
)
"""Contenders of the conversation, with and without a prefix cache. A hybrid model may have no Q8_0 file."""


def packages_for(contenders: Iterable[Contender]) -> dict[str, list[str]]:
    """Return the packages of contenders and of their forms' conversion, with the contenders that need each."""
    found: dict[str, list[str]] = {}
    for contender in contenders:
        engines, form = {ENGINES[contender.kind]} - {"chunkrt"}, contender.form
        while form != "checkpoint":
            engines.add(FORMS[form].engine)
            form = FORMS[form].of
        for package in sorted({package for engine in engines for package in PACKAGES[engine]}):
            found.setdefault(package, []).append(contender.name)
    return found
