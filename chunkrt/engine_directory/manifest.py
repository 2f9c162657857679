"""The engine directory: a compiled model on disk, with exactly the files that are needed to run it.

    engine.json          the manifest, with sizes and digests of all files
    plan.json            the plan
    weights.safetensors  weights prepared under the scheme
    tokenizer.json, text.json   the tokenizer and chat template, if the checkpoint has them
    adapters.json        the linears that adapters change, if the engine takes adapters (`adapter_targets.py`)
    adapters.npz         transformations of the weights of these linears, if there are any
    npu/                 compiled contexts, by the hash of their inputs (`backends/qnn/contexts.py`)

An engine directory may be copied to a device and run there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path

import msgspec
import xxhash

from chunkrt import __version__
from chunkrt.engine_directory.content import cache_key, keyed_path
from chunkrt.engine_directory.store import WeightStore
from chunkrt.errors import ConfigError, ModelError, cause_in_file, cause_of
from chunkrt.files import check_keys, check_regular, fingerprint, read_json, read_text
from chunkrt.graph.placement import Placement
from chunkrt.graph.plan import ALONE, Plan, Ranks
from chunkrt.quant.calibration import FORMAT as CALIBRATION_FORMAT
from chunkrt.quant.scheme import CHOICE_FORMAT, Recipe, Scheme
from chunkrt.tokenizer.text_settings import TEXT_FORMAT

FORMAT = 7
SPLIT_FORMAT = 3
"""Version of the split over ranks, raised when ranks would have other parts of a decoder."""
MANIFEST, PLAN, WEIGHTS, CONTEXTS = "engine.json", "plan.json", "weights.safetensors", "npu"
HASHED_WHEN_READ = 32 * 2**20
"""Files up to this many bytes are hashed whenever a manifest is read, by SHA-256. For larger files only the size is
compared at that time; they are hashed with a faster function while the model is loaded
(`engine_directory/verification.py`).
"""
FAST_HASH = "xxh3_128"
_READ_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class NpuTarget:
    """Target of the compiled static subgraphs: a SoC, a chunk length, and a version of onnxruntime-qnn."""

    soc: str
    chunk_length: int
    library: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of `engine.json`.

    Attributes:
        files: number of bytes and `digest` of each file, except contexts.
        placement: requested placement of modules, by patterns.
        ranks: rank that the directory is for, and number of ranks.
        checkpoint: `sampled_digest` of the source; empty if it was not recorded.
        num_parameters: number of parameters of the complete model, each counted once; 0 if it was not recorded.
        npu_attention: options under which attention was compiled for the NPU; empty if attention was not compiled for
            it.
        npu_settings: settings of the NPU that its contexts contain, by the names of `--htp`.
    """

    format: int
    chunkrt: str
    model: str
    scheme: Scheme
    files: Mapping[str, tuple[int, str]]
    npu: tuple[NpuTarget, ...] = ()
    placement: Placement = field(default_factory=dict)
    ranks: Ranks = ALONE
    checkpoint: str = ""
    num_parameters: int = 0
    npu_attention: Mapping[str, str | int] = field(default_factory=dict)
    npu_settings: Mapping[str, str] = field(default_factory=dict)


def is_engine_directory(path: Path) -> bool:
    """Return True if a path looks like an engine directory."""
    return (path / MANIFEST).is_file()


def cached_folder(
    cache: Path,
    checkpoint: Path,
    *,
    recipe: Recipe,
    placement: Placement,
    calibration: Path | None = None,
    adapter: Path | None = None,
    takes_adapters: bool = False,
    ranks: Ranks = ALONE,
) -> Path:
    """Return the cached path of a checkpoint's engine directory, which may not exist yet.

    The name covers the content of the checkpoint's files, the recipe, the placement, the contents of the calibration
    and of the adapter, whether adapters are loaded later, the ranks, chunkrt's version and the format.

    Raises:
        ConfigError: the calibration cannot be read.
    """
    try:
        grids = fingerprint(calibration)[1] if calibration else ""
    except OSError as error:
        raise ConfigError(f"cannot read the calibration {calibration}: {cause_of(error)}") from error
    key = cache_key(
        checkpoint,
        format=(FORMAT, CALIBRATION_FORMAT, CHOICE_FORMAT, TEXT_FORMAT),
        recipe=asdict(recipe),
        placement=list(placement.items()),
        grids=grids,
        ranks=astuple(ranks) if ranks.are_alone else (*astuple(ranks), SPLIT_FORMAT),
        adapter=adapter,
        **({"takes_adapters": True} if takes_adapters else {}),
    )
    return keyed_path(cache, checkpoint, key, kind=f"-{recipe.scheme.name}")


def write_manifest(
    folder: Path,
    *,
    model: str,
    scheme: Scheme,
    npu: Sequence[NpuTarget] = (),
    placement: Placement | None = None,
    ranks: Ranks = ALONE,
    checkpoint: str = "",
    num_parameters: int = 0,
    npu_attention: Mapping[str, str | int] | None = None,
    npu_settings: Mapping[str, str] | None = None,
) -> None:
    """Write `engine.json`. It is written last, so a folder with this file is complete."""
    files = {p.name: _recorded(p) for p in sorted(folder.iterdir()) if p.is_file() and p.name != MANIFEST}
    manifest = Manifest(
        format=FORMAT,
        chunkrt=__version__,
        model=model,
        scheme=scheme,
        files=files,
        npu=tuple(npu),
        placement=dict(placement or {}),
        ranks=ranks,
        checkpoint=checkpoint,
        num_parameters=num_parameters,
        npu_attention=dict(npu_attention or {}),
        npu_settings=dict(npu_settings or {}),
    )
    (folder / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1), encoding="utf-8", newline="\n")


def _recorded(path: Path) -> tuple[int, str]:
    size = path.stat().st_size
    return (size, digest(path, FAST_HASH)) if size > HASHED_WHEN_READ else fingerprint(path)


def digest(path: Path, algorithm: str, is_stopped: Callable[[], bool] = lambda: False) -> str:
    """Return a file's digest in the form of manifests: "xxh3_128:" and hexadecimal digits, or plain SHA-256 digits.

    Args:
        algorithm: the part before the colon; any other text means SHA-256.
        is_stopped: called after every MiB; if it returns True, the rest of the file is not read.

    Raises:
        OSError: the file cannot be read.
    """
    function = xxhash.xxh3_128() if algorithm == FAST_HASH else hashlib.sha256()
    piece = memoryview(bytearray(_READ_BYTES))
    check_regular(path)
    with path.open("rb", buffering=0) as file:
        while (length := file.readinto(piece)) and not is_stopped():
            function.update(piece[:length])
    return f"{FAST_HASH}:{function.hexdigest()}" if algorithm == FAST_HASH else function.hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read `engine.json`, and compare the files with it.

    Raises:
        ModelError: `engine.json` is missing, damaged, or of another format; or a file has changed since then.
    """
    try:
        data = read_json(folder / MANIFEST)
        if (found := data["format"]) != FORMAT:
            raise ModelError(
                f"{folder} has engine format {found}, this chunkrt reads {FORMAT}; compile the model again"
            )
        manifest = msgspec.convert(data, Manifest)
        Scheme.from_dict(data["scheme"])
        check_keys(data, Manifest)
        if not _is_sound(manifest):
            raise ValueError("it contains values of the wrong type")
    except (OSError, ValueError, TypeError, KeyError, ConfigError) as error:
        raise ModelError(
            f"{folder} is not an engine directory ({cause_in_file(error)}); compile the model again"
        ) from error
    for name in sorted({PLAN, WEIGHTS, *manifest.files}):
        _check_file(folder, name, manifest.files.get(name))
    return manifest


def _is_sound(manifest: Manifest) -> bool:
    are_inside = all(Path(name).name == name and name.isprintable() for name in manifest.files)
    return are_inside and all(target.chunk_length > 0 for target in manifest.npu)


def _check_file(folder: Path, name: str, expected: tuple[int, str] | None) -> None:
    path = folder / name
    try:
        size = path.stat().st_size
        is_small = size <= HASHED_WHEN_READ
        is_whole = expected is not None and size == expected[0] and (not is_small or fingerprint(path) == expected)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({cause_of(error)}); compile the model again") from error
    if not is_whole:
        raise ModelError(f"{path} has changed since the model was compiled; compile it again")


def read_plan(folder: Path) -> Plan:
    """Read `plan.json`. Raise ModelError if it is missing or damaged."""
    try:
        text = read_text(folder / PLAN)
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{folder / PLAN} cannot be read ({cause_of(error)}); compile the model again") from error
    return Plan.from_json(text)


def open_weights(folder: Path) -> WeightStore:
    """Map the weights. Raise ModelError if they are missing or damaged."""
    return WeightStore.open(folder / WEIGHTS)
