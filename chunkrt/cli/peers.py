"""What peers have and chunkrt has not, or has elsewhere: what to use instead, for who types it by habit."""

from __future__ import annotations

import click

_SCHEMA = "answers by a schema are the server's: chunkrt serve MODEL, with response_format (docs/server.md)"
_SPECULATION = "there is no speculation with a second model; run MODEL alone"
_ADAPTER = "adapters are not applied; merge it into the checkpoint first, as peft's merge_and_unload does"
_PLACES = "the NPU takes what it can and the CPU the rest; --npu and --place change that"
_CHUNK = "rows that are computed at once are a chunk; use --chunk"
_CACHE = "keys and values have one type; use --cache-type, as in -ctk q8_0"
_PREFIX = "what prompts begin with is kept by itself; on disk with --prefix-cache disk"
_TALK = "to talk with a model use chunkrt chat MODEL"
_NO_CONVERSION = "models are read as they are; chunkrt run FILE, with another --scheme perhaps"
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
    "--lora": _ADAPTER,
    "--lora-scaled": _ADAPTER,
    "--adapter-path": "adapters are not applied; merge it into the checkpoint first, as mlx_lm.fuse does",
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
    "--plot": "bench, simulate, tune, eval and trace draw pictures; the graphs of a plan: chunkrt plan --save-onnx",
}


def hidden_options() -> list[click.Option]:
    """Those with one dash and several letters. Click would take such a one for its first letter with a value."""
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
