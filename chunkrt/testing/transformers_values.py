"""Values of a model in Transformers, for comparisons. Only this module needs torch, transformers and peft."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.errors import ConfigError, ModelError
from chunkrt.files import read_json
from chunkrt.testing.comparison import Expected, ModuleValues

NEEDED = 'comparisons with Transformers need torch and transformers; run pip install "chunkrt[compare]"'


NEEDED_FOR_ADAPTERS = "comparisons with an adapter need PEFT; run pip install peft"


def expected_values(
    folder: Path, token_ids: Sequence[int] | NDArray[np.int64], *, adapter: Path | None = None
) -> Expected:
    """Run a checkpoint in Transformers in float32, and record the values of all modules.

    Args:
        folder: checkpoint folder of Hugging Face. Code in the folder is not executed.
        token_ids: at least one token.
        adapter: folder of a LoRA adapter, which PEFT merges into the checkpoint.

    Raises:
        ConfigError: torch, Transformers or PEFT is missing, or a token is outside the vocabulary.
        ModelError: Transformers cannot load the checkpoint, or PEFT cannot load the adapter.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ConfigError(f"{NEEDED} ({error})") from error
    if not (Path(folder) / "config.json").is_file():
        raise ModelError(f"{folder} is no checkpoint folder of Transformers: it has no config.json")
    ids = np.asarray(token_ids, np.int64)
    if not ids.size:
        raise ConfigError("there are no tokens to compare; give at least one")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",  # the default needs sizes that are multiples of 16 bytes
        ).eval()
    except Exception as error:  # Transformers raises errors of many kinds
        what = " ".join(str(error).split())[:200]
        raise ModelError(f"Transformers cannot load {folder} ({type(error).__name__}: {what})") from error
    if adapter is not None:
        model = _merged(model, adapter)
    if ids.size and not (ids.min() >= 0 and ids.max() < model.get_input_embeddings().num_embeddings):
        raise ConfigError(f"token ids are outside the vocabulary of {model.get_input_embeddings().num_embeddings}")
    values: dict[str, ModuleValues] = {}

    def record(name: str, has_weights: bool) -> Any:
        def hook(module: Any, given: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> None:
            inputs = [value for value in (*given, *keywords.values()) if isinstance(value, torch.Tensor)]
            output = result[0] if isinstance(result, tuple) and result else result
            values[name] = ModuleValues(
                input=_rows(inputs[0], ids.size) if inputs else None,
                output=_rows(output, ids.size) if isinstance(output, torch.Tensor) else None,
                has_weights=has_weights,
            )

        return hook

    seen = set[int]()
    """Weights of earlier modules: a tied LM head has none of its own."""
    for name, module in model.named_modules():
        if name:
            own = {id(weight) for weight in module.parameters(recurse=False)}
            has_weights, seen = bool(own - seen), seen | own
            module.register_forward_hook(record(name, has_weights), with_kwargs=True)
    with torch.no_grad():
        logits = model(torch.from_numpy(ids[None]), use_cache=False).logits[0].float().numpy()
    return Expected(token_ids=ids, logits=logits, modules=values)


def _merged(model: Any, adapter: Path) -> Any:
    """Return a model of Transformers with an adapter in its weights."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ConfigError(f"{NEEDED_FOR_ADAPTERS} ({error})") from error
    try:
        return PeftModel.from_pretrained(model, adapter).merge_and_unload().eval()
    except Exception as error:  # PEFT raises errors of many kinds
        what = " ".join(str(error).split())[:200]
        raise ModelError(f"PEFT cannot load {adapter} ({type(error).__name__}: {what})") from error


def _rows(tensor: Any, num_tokens: int) -> NDArray[np.float32] | None:
    """Return a tensor as float32 [T, n]; None if it has no row for each token."""
    if not tensor.is_floating_point() or tensor.ndim < 2:
        return None
    shape = tuple(tensor.shape)
    if shape[0] == 1 and shape[1] == num_tokens:
        tensor = tensor[0]
    elif shape[0] != num_tokens:
        return None
    found: NDArray[np.float32] = tensor.detach().float().reshape(num_tokens, -1).numpy().copy()
    return found


def random_tokens(folder: Path, number: int) -> NDArray[np.int64]:
    """Return random tokens of a checkpoint's vocabulary, the same for every call, int64 [n]."""
    config = read_json(folder / "config.json")
    vocab_size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise ModelError(f"{folder / 'config.json'} has no vocab_size")
    return np.random.default_rng(0).integers(0, vocab_size, number)
