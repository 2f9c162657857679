"""Tiny random decoders, exported by ONNX Runtime GenAI's model builder, by Optimum and by torch alone.

Each folder under tests/data/onnx/ is the tool's output for one decoder: the model, its configuration and the
tokenizer's files. The reference for values is the file itself, run by ONNX Runtime.

    python make_onnx_fixtures.py genai      the model builder's, in float32, float16 and int4
    python make_onnx_fixtures.py optimum    Optimum's, in float32 and quantised by ONNX Runtime
    python make_onnx_fixtures.py torch      torch.onnx.export's, with a cache, as a fixed window, and without a cache

All need torch, transformers and onnx; the first also onnxruntime-genai, the second optimum-onnx with the transformers
that it requires, the third onnxscript. tests/data/onnx/README.md has the versions that made the committed files.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import recurrent_fixtures
from make_fixtures import GEMMA3, LLAMA, PHI3, QWEN2, QWEN3, random_weights, write_checkpoint

FOLDER = Path(__file__).parents[1] / "data" / "onnx"
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")

# Heads have 16 dimensions, because ONNX Runtime rotates no smaller ones; K is a multiple of 32, because int4 has blocks
# of 32.
SIZES: dict[str, Any] = {
    "vocab_size": 104,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "torch_dtype": "float32",
}
INDEPENDENT_HEADS = {"head_dim": 16}
HALVED_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA | SIZES | INDEPENDENT_HEADS,
    "qwen2": QWEN2 | SIZES | HALVED_HEADS,
    "qwen3": QWEN3 | SIZES | INDEPENDENT_HEADS,
    "phi3": PHI3 | SIZES | HALVED_HEADS | {"sliding_window": 20},
    "gemma3": GEMMA3
    | SIZES
    | INDEPENDENT_HEADS
    | {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 24},
}
CONFIGS["lfm2"] = (
    recurrent_fixtures.CONFIGS["lfm2"] | SIZES | HALVED_HEADS | {"num_hidden_layers": 3, "full_attn_idxs": [1]}
)
CONFIGS["qwen3_5"] = recurrent_fixtures.CONFIGS["qwen3_5"] | SIZES | HALVED_HEADS | {"num_hidden_layers": 3}
RECURRENT = ("lfm2", "qwen3_5")
"""Families that Optimum does not export."""

# Without Gemma 3, whose rotary tables the builder of 0.18 does not find in Transformers 5's configuration.
GENAI_PRECISIONS = {"llama": ("fp32", "fp16", "int4", "int4_qdq"), "qwen2": ("fp32", "int4")}
GENAI_PRECISIONS |= {"qwen3": ("fp32", "int4"), "phi3": ("fp32",), "lfm2": ("fp32",), "qwen3_5": ("fp32",)}


def main() -> None:
    """Remake the fixtures of one tool."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tool", choices=("genai", "optimum", "torch"))
    parser.add_argument("--only", choices=tuple(CONFIGS), help="one family alone")
    arguments = parser.parse_args()
    make = {"genai": make_genai, "optimum": make_optimum, "torch": make_torch}[arguments.tool]
    for seed, (family, config) in enumerate(CONFIGS.items(), 3000):
        if arguments.only not in (None, family):
            continue
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = Path(folder) / "checkpoint"
            if family == "qwen3_5":
                _write_with_vision(checkpoint, config, np.random.default_rng(seed))
            else:
                weights = recurrent_fixtures.random_weights if family == "lfm2" else random_weights
                write_checkpoint(checkpoint, config, weights(config, np.random.default_rng(seed)))
            _write_tokenizer(checkpoint)
            make(family, checkpoint, Path(folder))


def make_genai(family: str, checkpoint: Path, scratch: Path) -> None:
    """Export `checkpoint` by `onnxruntime_genai.models.builder` at every precision chosen for the family."""
    for name in GENAI_PRECISIONS.get(family, ()):
        precision = name.removesuffix("_qdq")
        # The command line accepts fp16 for GPUs only; the model also runs on the CPU.
        provider = "cuda" if precision == "fp16" else "cpu"
        options = ["int4_block_size=32", "int4_accuracy_level=1", "int4_algo_config=default"]
        options += ["use_qdq=true"] if name != precision else []
        command = ["-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint), "-p", precision, "-e", provider]
        target = scratch / name
        extra = ["--extra_options", *options] if precision == "int4" else []
        subprocess.run([sys.executable, *command, "-o", str(target), "-c", str(scratch / "cache"), *extra], check=True)
        _keep(target, f"genai_{family}_{name}")


def make_optimum(family: str, checkpoint: Path, scratch: Path) -> None:
    """Export `checkpoint` by `optimum-cli export onnx`, and quantise a llama's linears by ONNX Runtime."""
    if family in RECURRENT:
        return
    target = scratch / "optimum"
    command = ["-m", "optimum.commands.optimum_cli", "export", "onnx", "--model", str(checkpoint)]
    subprocess.run([sys.executable, *command, "--task", "text-generation-with-past", str(target)], check=True)
    _keep(target, f"optimum_{family}_fp32")
    if family == "llama":
        from onnxruntime.quantization import QuantType, quantize_dynamic

        for weight in (QuantType.QInt8, QuantType.QUInt8):
            quantised = scratch / weight.name
            shutil.copytree(target, quantised)
            quantize_dynamic(
                target / "model.onnx",
                quantised / "model.onnx",
                op_types_to_quantize=["MatMul"],
                per_channel=weight is QuantType.QInt8,
                weight_type=weight,
            )
            _keep(quantised, f"optimum_{family}_{'int8' if weight is QuantType.QInt8 else 'uint8'}")


def make_torch(family: str, checkpoint: Path, scratch: Path) -> None:
    """Export a llama by `torch.onnx.export` in the forms that people write by hand."""
    if family != "llama":
        return
    for name, form in TORCH_FORMS.items():
        target = scratch / name
        target.mkdir()
        _export_by_torch(checkpoint, target / "model.onnx", **form)
        shutil.copy(checkpoint / "config.json", target)
        _keep(target, f"torch_{name}")


TORCH_FORMS: dict[str, dict[str, Any]] = {
    "cache_fp32": {"opset": 14, "attention": "eager"},
    "cache_dynamo_fp16": {"opset": 23, "attention": "sdpa", "is_half": True, "dynamo": True},
    "window_8_fp32": {"opset": 17, "attention": "eager", "window": 8},
    "window_8_kept_fp32": {"opset": 17, "attention": "sdpa", "window": 8, "keeps_length": True},
    "window_48_fp32": {"opset": 17, "attention": "eager", "window": 48, "slots": 64},
    "window_1_fp16": {"opset": 17, "attention": "eager", "window": 1, "is_half": True},
    "whole_dynamo_fp32": {"opset": 18, "attention": "sdpa", "dynamo": True, "has_cache": False},
    "whole_fp32": {"opset": 17, "attention": "eager", "has_cache": False},
}
"""Options of `_export_by_torch`."""

NUM_SLOTS = 32
"""Number of tokens that a fixed window and its past have together."""


def _export_by_torch(
    checkpoint: Path,
    file: Path,
    *,
    opset: int,
    attention: str,
    is_half: bool = False,
    dynamo: bool = False,
    has_cache: bool = True,
    window: int = 0,
    slots: int = NUM_SLOTS,
    keeps_length: bool = False,
) -> None:
    """Export a checkpoint.

    Args:
        window: number of tokens of a fixed window; 0 for free lengths.
        slots: number of tokens that the window and its past have together.
        keeps_length: whether the window returns as many keys and values as it takes, without the oldest.
    """
    import onnx
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.cache_utils import DynamicCache

    dtype = torch.float16 if is_half else torch.float32
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, attn_implementation=attention).eval()

    class Whole(torch.nn.Module):
        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits

    class WithCache(torch.nn.Module):
        def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, *past: Any) -> Any:
            cache = DynamicCache()
            for layer in range(len(past) // 2):
                cache.update(past[2 * layer], past[2 * layer + 1], layer)
            given = {"attention_mask": attention_mask, "position_ids": position_ids, "past_key_values": cache}
            result = model(input_ids=input_ids, use_cache=True, **given)
            present = [v for layer in result.past_key_values.layers for v in (layer.keys, layer.values)]
            kept = [v[:, :, input_ids.shape[1] :] for v in present] if keeps_length else present
            return result.logits, *kept

    module: torch.nn.Module = WithCache() if has_cache else Whole()
    module.model = model
    batch, length = (1, window) if window else (2, 5)
    past = (slots - window if window else 3) if has_cache else 0
    layers, heads, width = (SIZES["num_hidden_layers"], SIZES["num_key_value_heads"], INDEPENDENT_HEADS["head_dim"])
    states = [f"past_key_values.{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]
    names, outputs = ["input_ids", "attention_mask"], ["logits"]
    tokens, mask = torch.ones(batch, length, dtype=torch.long), torch.ones(batch, past + length, dtype=torch.long)
    arguments: list[Any] = [tokens, mask]
    free: dict[str, dict[int, str]] = {"input_ids": {0: "batch", 1: "length"}, "attention_mask": {0: "batch", 1: "all"}}
    if has_cache:
        names += ["position_ids", *states]
        outputs += [name.replace("past_key_values", "present") for name in states]
        arguments.append(torch.arange(past, past + length)[None].repeat(batch, 1))
        arguments += [torch.zeros(batch, heads, past, width, dtype=dtype) for _ in states]
        free |= {"position_ids": {0: "batch", 1: "length"}} | {name: {0: "batch", 2: "past"} for name in states}
    options: dict[str, Any] = {"input_names": names, "output_names": outputs, "opset_version": opset, "dynamo": dynamo}
    if dynamo:
        dims = {n: torch.export.Dim(n) for n in ("batch", "length", "past")} | {"all": torch.export.Dim.DYNAMIC}
        if not has_cache:
            dims["all"] = dims["length"]
        by_input = [{axis: dims[name] for axis, name in free[n].items()} for n in names]
        shapes = (*by_input[:3], tuple(by_input[3:])) if has_cache else tuple(by_input)
        options |= {"dynamic_shapes": None if window else shapes, "external_data": False}
    elif not window:
        present = {name: {0: "batch", 2: "all"} for name in outputs[1:]}
        options["dynamic_axes"] = free | {"logits": {0: "batch", 1: "length"}} | present
    torch.onnx.export(module, tuple(arguments), file, **options)
    exported = onnx.load(file)
    for described in (*exported.graph.node, *exported.graph.value_info, *exported.graph.input, *exported.graph.output):
        described.ClearField("metadata_props")  # source code and paths of the exporting machine
        described.ClearField("doc_string")
    onnx.save(exported, file)


def _write_with_vision(folder: Path, text: dict[str, Any], rng: np.random.Generator) -> None:
    """Write a checkpoint of text and images, the only form of Qwen3.5 that the builder of 0.18 takes; it exports the
    text."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_position_embeddings": 16}
    vision |= {"out_hidden_size": text["hidden_size"], "deepstack_visual_indexes": []}
    text = {key: value for key, value in text.items() if key != "architectures"}
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision, tie_word_embeddings=False)
    config.architectures = ["Qwen3_5ForConditionalGeneration"]
    model = AutoModelForImageTextToText.from_config(config)
    shapes = {name: tuple(v.shape) for name, v in model.state_dict().items() if "visual" not in name}
    weights = {name: recurrent_fixtures.random_tensor(name, shape, text, rng) for name, shape in shapes.items()}
    model.load_state_dict({n: torch.from_numpy(np.ascontiguousarray(w)) for n, w in weights.items()}, strict=False)
    model.save_pretrained(folder)


def _keep(exported: Path, name: str) -> None:
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    shutil.copytree(exported, FOLDER / name)


def _write_tokenizer(folder: Path) -> None:
    """Write a byte-level vocabulary of the special tokens and ASCII's printable characters, one token each."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*SPECIAL_TOKENS, *(chr(code) for code in range(33, 127)), "\u0120", "\u010a"]  # the space and newline
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


if __name__ == "__main__":
    main()
