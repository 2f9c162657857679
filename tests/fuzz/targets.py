"""Targets of the fuzzer: for each format valid files, their mutation, and a user's use of the result."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp

import onnx
from fixture_checkpoints import checkpoint
from fuzz.mutation import (
    gguf_fields,
    mutate_archive,
    mutate_bytes,
    mutate_gguf,
    mutate_json,
    mutate_message,
    mutate_text,
    mutate_toml,
)
from shared_runs import shared_records
from states import make_state

import chunkrt
from chunkrt.checkpoints import catalogue
from chunkrt.checkpoints.catalogue.entry import read_entry
from chunkrt.checkpoints.checkpoint import open_checkpoint
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.engine.settings import read_settings
from chunkrt.engine_directory.manifest import MANIFEST, PLAN, WEIGHTS
from chunkrt.graph.placement import read_placement
from chunkrt.quant.calibration import Calibration
from chunkrt.runtime.trace.file import read_trace, write_trace
from chunkrt.runtime.trace.idle import where_time_went
from chunkrt.simulate.profile import read_profile
from chunkrt.tokenizer import Tokenizer
from chunkrt.tokenizer.chat_template import ChatTemplate

PROMPT = [1, 5, 7, 2, 9, 3, 3, 8, 6]
DECODERS = ("llama_gqa", "lfm2", "gemma3_window_5", "qwen3_next")
GGUFS = ("llama_biased_gguf", "lfm2_gguf", "phi3_longrope_gguf", "qwen3_next_experts_gguf")
ONNX_DECODERS = Path(__file__).parents[1] / "data" / "onnx"
ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parents[1] / "data"
QUANTISED = tuple(f"quantised/{path.name}" for path in sorted((DATA / "quantised").iterdir()))
TEMPLATES = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] | trim }}{% endfor %}{{ bos_token }}",
    "{% set ns = namespace(s='x') %}{% for i in range(9) %}{% set ns.s = ns.s ~ i %}{% endfor %}{{ ns.s | tojson }}",
    "{% macro f(x) %}{{ x | upper }}{% endmacro %}{{ f(messages[0].content) | replace('a', 'b') | indent(4) }}",
)
SNIPPETS = (
    "{{ 'a' * 99999999 }}", "{% for a in range(99999) %}", "{% endfor %}", "{{ ns.s ~ ns.s }}", " | format(1)",
    "'%999999999d'", "{% set ns.s = ns.s ~ ns.s %}", ".__class__", " | join('x' * 9999)", "{{ f(f) }}", "{{ self }}",
    "[::-1]", " ** 99999999", " | center(2 ** 40)", "{{ cycler }}", "{% include 'x' %}", "{#", "{% raw %}",
    " | wordwrap(1)", "{{ dict(a=1) | pprint }}",
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A format.

    seeds: names of valid files. make: writes a mutated one into an empty folder, and returns its path. use: uses it
    like a user; raises only chunkrt's own errors.
    """

    seeds: tuple[str, ...]
    make: Callable[[Random, str, Path], Path]
    use: Callable[[Path], object]


@cache
def scratch() -> Path:
    """Return the folder of valid files, made once a process."""
    return Path(mkdtemp(prefix="chunkrt-fuzz-"))


@cache
def engine_folder(name: str, scheme: str = "w8a8-dynamic") -> Path:
    """Return the engine directory of a fixture."""
    with chunkrt.load(checkpoint(name), scheme=scheme, npu="reference", threads=1) as engine:
        return Path(engine.folder)


def use_engine(folder: Path) -> None:
    """Load it directly, and run a prompt."""
    for npu in ("native", "reference"):
        with chunkrt.load(folder, npu=npu, threads=1) as engine:
            session = engine.session()
            session.prefill(PROMPT)
            list(session.generate(max_new_tokens=2))


def use_checkpoint(path: Path) -> None:
    """Open it, build its decoder and read every weight and its tokenizer."""
    planned = plan_checkpoint(path, {})
    for name in planned.parameters:
        planned.load(name)
    if (tokenizer := Tokenizer.from_source(planned.source)) is not None:
        tokenizer.decode(tokenizer.encode("What is it?", add_special=True, parse_special=True))


def _changed_engine(name: str) -> Callable[[Random, str, Path], Path]:
    """Change a file of an engine directory, and the manifest's record of it."""

    def make(random: Random, seed: str, folder: Path) -> Path:
        target = folder / "engine"
        shutil.copytree(engine_folder(seed), target)
        content = (target / name).read_bytes()
        if name == WEIGHTS:
            length = int.from_bytes(content[:8], "little")
            header = mutate_json(random, content[8 : 8 + length])
            size = random.choice([0, 2**31, 2**63 - 1, length]) if random.random() < 0.1 else len(header)
            content = size.to_bytes(8, "little") + header + content[8 + length :]
        else:
            content = mutate_json(random, content)
        (target / name).write_bytes(content)
        if name != MANIFEST:
            manifest = json.loads((target / MANIFEST).read_text())
            manifest["files"][name] = [len(content), hashlib.sha256(content).hexdigest()]
            (target / MANIFEST).write_text(json.dumps(manifest))
        return target

    return make


def use_weights(path: Path) -> None:
    """Open a checkpoint and read every tensor."""
    source = open_checkpoint(path)
    for name in source.names():
        source.read_blocks(name)
        source.read(name)


def _pickled(random: Random, seed: str, folder: Path) -> Path:
    target = folder / "model"
    shutil.copytree(DATA / seed, target, ignore=shutil.ignore_patterns("*.npz"))
    path = target / "pytorch_model.bin"
    with zipfile.ZipFile(path) as archive:
        members = {member: archive.read(member) for member in archive.namelist()}
    (table,) = (member for member in members if member.endswith("data.pkl"))
    members[table] = mutate_bytes(random, members[table])
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    if random.random() < 0.2:
        path.write_bytes(mutate_bytes(random, path.read_bytes()))
    return target


def _safetensors(random: Random, seed: str, folder: Path) -> Path:
    target = folder / "model"
    valid = DATA / seed if seed.startswith("quantised/") else checkpoint(seed)
    shutil.copytree(valid, target, ignore=shutil.ignore_patterns("*.npz"))
    if random.random() < 0.5:
        path = target / "config.json"
        path.write_bytes(mutate_json(random, path.read_bytes()))
    else:
        path = target / "model.safetensors"
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = mutate_json(random, content[8 : 8 + length])
        path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
        if random.random() < 0.1:
            path.write_bytes(mutate_bytes(random, content))
    return target


@cache
def _gguf_seed(name: str) -> tuple[bytes, tuple[tuple[int, int], ...]]:
    content = checkpoint(name).read_bytes()
    return content, tuple(gguf_fields(content))


def _gguf(random: Random, seed: str, folder: Path) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(mutate_gguf(random, *_gguf_seed(seed)))
    return path


def _tokenizer(random: Random, seed: str, folder: Path) -> Path:
    for path in (engine_folder(seed)).glob("t*.json"):
        content = path.read_bytes()
        (folder / path.name).write_bytes(mutate_json(random, content) if random.random() < 0.6 else content)
    return folder


def _use_tokenizer(folder: Path) -> None:
    if (tokenizer := Tokenizer.load(folder)) is not None:
        for text in ("What is it?", "\0é\U0001f600", "<|im_start|>"):
            tokenizer.decode(tokenizer.encode(text, add_special=True, parse_special=True))


def _template(random: Random, seed: str, folder: Path) -> Path:
    path = folder / "template.jinja"
    path.write_text(mutate_text(random, TEMPLATES[int(seed)], SNIPPETS), encoding="utf-8")
    return path


def _use_template(path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho" * 100}]
    template = ChatTemplate(path.read_text("utf-8"))
    template.render(messages, add_generation_prompt=True, bos_token="<s>", eos_token="</s>")


def _onnx(random: Random, seed: str, folder: Path) -> Path:
    target = folder / "model"
    shutil.copytree(ONNX_DECODERS / seed, target)
    path = target / "model.onnx"
    if random.random() < 0.1:
        path.write_bytes(mutate_bytes(random, path.read_bytes()))
    else:
        model = onnx.load(path, load_external_data=False)
        for _ in range(random.choice([1, 1, 2])):
            mutate_message(random, model.graph)
        path.write_bytes(model.SerializeToString())
    return target


def _use_onnx(folder: Path) -> None:
    with chunkrt.load(folder, npu="reference", scheme="float", threads=1) as engine:
        engine.session().prefill(PROMPT)


@cache
def _members(kind: str, name: str) -> dict[str, bytes]:
    path = scratch() / f"{kind}-{name}.npz"
    if kind == "state":
        make_state(_engine(name), PROMPT).save(path)
    else:
        with chunkrt.load(checkpoint(name), scheme="w8a8", npu="reference", threads=1):
            pass  # makes a calibration
        made = sorted((catalogue.home() / "calibrations").glob("*.npz"), key=lambda found: found.stat().st_mtime)
        shutil.copy(made[-1], path)
    with zipfile.ZipFile(path) as archive:
        return {member: archive.read(member) for member in archive.namelist()}


@cache
def _engine(name: str) -> chunkrt.Engine:
    return chunkrt.load(checkpoint(name), npu="reference", scheme="float", threads=1)


def _archive(kind: str) -> Callable[[Random, str, Path], Path]:
    def make(random: Random, seed: str, folder: Path) -> Path:
        path = folder / f"{seed}.npz"
        method = random.choice([zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
        with zipfile.ZipFile(path, "w", method) as archive:
            for name, content in mutate_archive(random, _members(kind, seed)).items():
                archive.writestr(name, content)
        if random.random() < 0.2:
            path.write_bytes(mutate_bytes(random, path.read_bytes()))
        return path

    return make


def _use_state(path: Path) -> None:
    state = make_state(_engine(path.stem))
    state.load(path)
    state.save(path.with_name("again.npz"))


def _toml(find: Callable[[str], Path | str]) -> Callable[[Random, str, Path], Path]:
    def make(random: Random, seed: str, folder: Path) -> Path:
        found = find(seed)
        content = found.read_bytes() if isinstance(found, Path) else found.encode()
        path = folder / "file.toml"
        path.write_bytes(mutate_toml(random, content))
        return path

    return make


SETTINGS = """soc = "SM8650"
scheme = "w8a16"
chunk_length = 128
policy = "look_ahead"
chunks_in_flight = 4
threads = 2
affinity = "0"
context_length = 256
context_shift = true
context_keep = 4
cache_dtype = "float16"
budget = 0.01
outputs = "grid"
equalisation = 0.5
rotation = false
ops = "all,-rms_norm"
calibration = "c.npz"
on_npu_failure = "fail"
[htp]
performance_mode = "burst"
vtcm_mb = 4
[placement]
"model.layers.*.mlp.down_proj" = "cpu"
"model.layers.0" = "npu"
"""
PLACEMENT = '"model.layers.*.mlp" = "cpu"\n"model.layers.0.self_attn" = "npu"\n"lm_head" = "npu"\n'


@cache
def _trace() -> bytes:
    path = scratch() / "trace.json"
    records = shared_records(checkpoint("llama_gqa"), [PROMPT, PROMPT[:5]], npu="reference", chunk_length=4, threads=2)
    write_trace(path, records, "fuzz")
    return path.read_bytes()


def _make_trace(random: Random, seed: str, folder: Path) -> Path:
    path = folder / "trace.json"
    path.write_bytes(mutate_json(random, _trace()))
    return path


def _use_trace(path: Path) -> None:
    where_time_went(read_trace(path))


TARGETS = {
    "gguf": Target(GGUFS, _gguf, use_checkpoint),
    "safetensors": Target(DECODERS, _safetensors, use_checkpoint),
    "quantised": Target(QUANTISED, _safetensors, use_weights),
    "pickled": Target(("pickled",), _pickled, use_weights),
    "tokenizer": Target(("llama_biased_gguf", "gemma3_gguf"), _tokenizer, _use_tokenizer),
    "template": Target(("0", "1", "2"), _template, _use_template),
    "onnx": Target(("genai_llama_fp32", "optimum_llama_fp32", "genai_llama_int4"), _onnx, _use_onnx),
    "plan": Target(DECODERS, _changed_engine(PLAN), use_engine),
    "manifest": Target(DECODERS, _changed_engine(MANIFEST), use_engine),
    "weights": Target(DECODERS, _changed_engine(WEIGHTS), use_engine),
    "state": Target(("llama_gqa", "lfm2"), _archive("state"), _use_state),
    "calibration": Target(("llama_biased_gguf",), _archive("calibration"), Calibration.load),
    "settings": Target(("settings",), _toml(lambda seed: SETTINGS), read_settings),
    "placement": Target(("placement",), _toml(lambda seed: PLACEMENT), read_placement),
    "entry": Target(("smollm2-135m-instruct",), _toml(lambda seed: ROOT / "models" / f"{seed}.toml"), read_entry),
    "profile": Target(
        ("sd8gen3", "sd8elite"), _toml(lambda seed: ROOT / "chunkrt/simulate/devices" / f"{seed}.toml"), read_profile
    ),
    "trace": Target(("trace",), _make_trace, _use_trace),
}
