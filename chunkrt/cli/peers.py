"""Commands and options of other tools, with hints at their equivalents in chunkrt."""

from __future__ import annotations

import click

_SCHEMA = "the server answers by a schema: chunkrt serve MODEL, with response_format (docs/server.md)"
_SPECULATION = "speculative decoding is not supported; run MODEL alone"
_ADAPTER = "an adapter is added to the weights at its own scale; use --adapter of run, chat, serve and others"
_PLACES = "all subgraphs that fit the NPU run there and the rest on the CPU; use --npu and --place"
_CHUNK = "rows that are computed at once are a chunk; use --chunk"
_CACHE = "keys and values have one data type; use --cache-type, e.g. -ctk q8_0"
_PREFIX = "prompt prefixes are cached by default; use --prefix-cache disk to keep them on disk"
_TALK = "use chunkrt chat MODEL"
_NO_CONVERSION = "no conversion is needed; use chunkrt run FILE, with --scheme to change the quantisation"
_LIST = "use chunkrt models, or chunkrt cache list"
_REMOVE = "use chunkrt models --remove NAME"
INSTEAD = {
    "tokenize": "in Python: chunkrt.load(MODEL).tokenizer.encode(TEXT)",
    "tokenise": "in Python: chunkrt.load(MODEL).tokenizer.encode(TEXT)",
    "server": "use chunkrt serve MODEL",
    "generate": "use chunkrt run MODEL",
    "perplexity": "use chunkrt eval MODEL --text FILE",
    "quantize": _NO_CONVERSION,
    "convert": _NO_CONVERSION,
    "download": "use chunkrt pull MODEL",
    "list": _LIST,
    "ls": _LIST,
    "rm": _REMOVE,
    "lora": _ADAPTER,
    "help": "use chunkrt --help, or chunkrt COMMAND --help",
    "--lora-scaled": _ADAPTER,
    "--adapter-path": "MLX's adapters are not read; fuse them with mlx_lm.fuse, or give a folder of PEFT to --adapter",
    "--grammar": _SCHEMA,
    "--grammar-file": _SCHEMA,
    "--json-schema": _SCHEMA,
    "--model-draft": _SPECULATION,
    "-md": _SPECULATION,
    "--draft-model": _SPECULATION,
    "--draft": _SPECULATION,
    "--draft-max": _SPECULATION,
    "--num-draft-tokens": _SPECULATION,
    "-ngl": _PLACES,
    "--gpu-layers": _PLACES,
    "--n-gpu-layers": _PLACES,
    "--batch-size": _CHUNK,
    "-ub": _CHUNK,
    "--ubatch-size": _CHUNK,
    "--prefill-step-size": _CHUNK,
    "-ctv": _CACHE,
    "--cache-type-v": _CACHE,
    "--kv-bits": _CACHE,
    "--prompt-cache": _PREFIX,
    "--prompt-cache-file": _PREFIX,
    "--interactive": _TALK,
    "-cnv": _TALK,
    "--conversation": _TALK,
    "-sys": "use --system TEXT of run and chat",
    "--system-prompt": "use --system TEXT of run and chat",
    "--n-predict": "use -n of run and chat",
    "--predict": "use -n of run and chat",
    "--reverse-prompt": "use --stop TEXT of run and chat",
    "-hfr": "name the model itself: -hf org/name:Q4_0",
    "--hf-repo": "name the model itself: -hf org/name:Q4_0",
    "-hff": "name the quantisation: -hf org/name:Q4_0",
    "--hf-file": "name the quantisation: -hf org/name:Q4_0",
    "--plot": "bench, simulate, tune, eval and trace draw plots; chunkrt plan --save-onnx writes the graphs of a plan",
}


def hidden_options() -> list[click.Option]:
    """Return options with one dash and several letters, which click would parse as a letter with a value."""
    names = [name for name in INSTEAD if name[0] == "-" != name[1]]
    return [
        click.Option(
            [name, f"peers_{name[1:]}"],
            is_flag=True,
            hidden=True,
            expose_value=False,
            is_eager=True,
            callback=_refuse_if_given,
        )
        for name in names
    ]


def _refuse_if_given(_: click.Context, option: click.Parameter, is_given: bool) -> None:
    if is_given:
        raise click.NoSuchOption(option.opts[0])
