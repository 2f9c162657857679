"""Execution of an exported fixed window with ONNX Runtime, by a small loop that serves as the export's reference.

States stay on the device, in two alternating sets of buffers: the next run reads the set that this run writes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, overload

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from chunkrt.errors import BackendError, ConfigError, ModelError
from chunkrt.onnx.importing.evaluation import open_session
from chunkrt.onnx.importing.reading import read_proto

SETTINGS_KEY, PLAN_KEY = "chunkrt.export", "chunkrt.plan"
_SETTINGS = {"window", "sequence", "context", "dtype", "keys"}
_OF_CACHES = ("context", "dtype", "keys", "sinks")
_PAST, _PRESENT = "past_key_values.", "present."
_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}


class OnnxSession:
    """A decoder exported by `chunkrt export`, run window by window.

    Tokens are run in windows of W rows; the first window is padded on the left. Generated tokens, and tokens after the
    first call that do not fill a window, need a window of one row, which is another export of the same model and
    context.

    An export with `--batch` runs several sequences at once. An export with `--no-cache` runs all tokens again with each
    call.

    Args:
        model: the ONNX file, of any window.
        step: an export with a window of 1; not needed if the window of `model` is 1.
        providers: ONNX Runtime's providers, the preferred one first.
        threads: number of ONNX Runtime's threads; by default its own choice.
        prepack: whether ONNX Runtime copies weights into its own layouts; by default they stay memory-mapped.

    Raises:
        ModelError: a file is damaged, or is not a fixed window that chunkrt exported.
        ConfigError: the two files do not match.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        step: str | os.PathLike[str] | None = None,
        *,
        providers: Sequence[str] = ("CPUExecutionProvider",),
        threads: int | None = None,
        prepack: bool = False,
    ) -> None:
        self._window = _LoadedWindow(Path(model), providers, threads, prepack)
        self._step = _LoadedWindow(Path(step), providers, threads, prepack) if step else self._window
        if step and not (self._window.has_cache and self._step.has_cache):
            raise ConfigError(f"{model} or {step} was exported with --no-cache, which takes no step")
        if any(self._step.settings.get(key) != self._window.settings.get(key) for key in _OF_CACHES):
            raise ConfigError(
                f"{step} and {model} do not have the same caches; export both with the same context, dtype, keys and "
                "sinks"
            )
        if self._step.plan != self._window.plan or self._step.states != self._window.states:
            raise ConfigError(f"{step} and {model} are exports of different decoders")
        if step and self._step.size != 1:
            raise ConfigError(f"{step} has a window of {self._step.size}, expected 1")
        self._device = "cuda" if self._window.provider == "CUDAExecutionProvider" else "cpu"
        self.reset()

    @property
    def window(self) -> int:
        """Number of rows in a run of the first model."""
        return self._window.size

    @property
    def position(self) -> int:
        """Number of tokens so far, of the longest sequence. If it exceeds the sequence length T, attention covers only
        the last T tokens.
        """
        return int(self._positions.max())

    @property
    def positions(self) -> tuple[int, ...]:
        """Number of tokens of each sequence so far."""
        return tuple(self._positions.tolist())

    @property
    def batch(self) -> int:
        """Number of sequences that run at once."""
        return self._window.batch

    def reset(self) -> None:
        """Forget all tokens."""
        self._positions = np.zeros(self.batch, np.int64)
        self._tokens: list[NDArray[np.int64]] = [np.zeros(0, np.int64)] * self.batch
        self._past, self._present = (
            {
                name: ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype), self._device, 0)
                for name, (shape, dtype) in self._window.states.items()
            }
            for _ in range(2)
        )

    @overload
    def run(self, token_ids: Sequence[int]) -> NDArray[Any]: ...
    @overload
    def run(self, token_ids: Sequence[Sequence[int]]) -> list[NDArray[Any]]: ...
    def run(self, token_ids: Sequence[int] | Sequence[Sequence[int]]) -> NDArray[Any] | list[NDArray[Any]]:
        """Return logits [tokens, vocabulary] of tokens that follow the earlier ones, in the model's type. An export
        with `--logits last` returns those of the last token, [1, vocabulary].

        Args:
            token_ids: tokens; with a batch of B > 1, the tokens of B sequences, and the result is a list of B arrays.
                In the first call, sequences may have different lengths; later, each takes the same number of tokens.

        Raises:
            ConfigError: there are no tokens, or a token is not in the vocabulary; or tokens need a window of one row,
                and the session has none; or tokens exceed the model's context with keys cached after RoPE, or the
                sequence without a cache; or the sequences do not match the batch.
            BackendError: ONNX Runtime failed.
        """
        given = [self._window.checked(each) for each in self._sequences(token_ids)]
        ends = self._positions + [len(tokens) for tokens in given]
        if self._window.num_positions is not None and max(ends) > self._window.num_positions:
            raise ConfigError(
                f"{max(ends)} tokens exceed the model's context of {self._window.num_positions}; an export with --keys "
                "pre-rope has no limit"
            )
        logits = self._run_with_cache(given) if self._window.has_cache else self._run_again(given)
        return logits[0] if self.batch == 1 else logits

    def _sequences(self, token_ids: Sequence[int] | Sequence[Sequence[int]]) -> Sequence[Any]:
        if self.batch == 1:
            return [token_ids]
        if len(token_ids) != self.batch or any(isinstance(tokens, int) for tokens in token_ids):
            raise ConfigError(f"the export runs {self.batch} sequences at once; pass a list of tokens for each")
        return token_ids

    def _run_with_cache(self, given: Sequence[NDArray[np.int64]]) -> list[NDArray[Any]]:
        count = max(len(tokens) for tokens in given)
        is_first = not self._positions.any()
        if not is_first and any(len(tokens) != count for tokens in given):
            raise ConfigError(
                f"after the first call, each sequence takes the same number of tokens; {count} is the most"
            )
        in_windows = count if is_first else count // self.window * self.window
        if in_windows < count and self._step.size != 1:
            raise ConfigError(
                f"after position {self.position}, {count} tokens are not a multiple of the window of {self.window}; "
                "pass OnnxSession an export with --window 1 as its step"
            )
        length = -(-in_windows // self.window) * self.window
        padding = np.array([length + count - in_windows - len(tokens) for tokens in given])
        padded = np.stack([np.pad(tokens, (n, 0)) for tokens, n in zip(given, padding, strict=True)])
        starts = [(self._window, start) for start in range(0, length, self.window)]
        starts += [(self._step, start) for start in range(length, padded.shape[1])]
        parts = [
            self._run(model, padded[:, start : start + model.size], (padding - start).clip(0, model.size))
            for model, start in starts
        ]
        if self._window.gives_last_only:
            return list(parts[-1])
        return [rows[n:] for rows, n in zip(np.concatenate(parts, axis=1), padding, strict=True)]

    def _run_again(self, given: Sequence[NDArray[np.int64]]) -> list[NDArray[Any]]:
        """Run all tokens so far without a cache, and return the logits of the given ones."""
        tokens = [np.concatenate(pair) for pair in zip(self._tokens, given, strict=True)]
        if (count := max(len(each) for each in tokens)) > self.window:
            raise ConfigError(f"{count} tokens exceed the sequence of {self.window} of an export with --no-cache")
        padding = np.array([self.window - len(each) for each in tokens])
        padded = np.stack([np.pad(each, (n, 0)) for each, n in zip(tokens, padding, strict=True)])
        self._positions = np.zeros(self.batch, np.int64)
        logits = self._run(self._window, padded, padding)
        self._tokens = tokens
        return [rows[-len(each) :] for rows, each in zip(logits, given, strict=True)]

    def generate(
        self, token_ids: Sequence[int], max_new_tokens: int, *, eos_ids: Collection[int] = ()
    ) -> Iterator[int]:
        """Run a prompt, then yield the likeliest next token repeatedly; an end token is not returned.

        Raises:
            ConfigError: `max_new_tokens` is negative, or the export has a batch; or see `run`.
            BackendError: see `run`.
        """
        if max_new_tokens < 0:
            raise ConfigError(f"max_new_tokens is {max_new_tokens}, expected at least 0")
        if self.batch > 1:
            raise ConfigError(f"the export runs {self.batch} sequences at once; call run")
        logits = self.run(token_ids)
        for index in range(max_new_tokens):
            token = int(logits[-1].argmax())
            if token in eos_ids:
                return
            yield token
            if index + 1 < max_new_tokens:
                logits = self.run([token])

    def _run(self, model: _LoadedWindow, tokens: NDArray[np.int64], padding: NDArray[np.int64]) -> NDArray[Any]:
        """Run tokens [B, W], the first `padding` [B] of which are padding; return logits [B, W or 1, vocabulary]."""
        done = (self._positions + model.size - padding)[:, None]
        sequence = int(model.settings["sequence"])
        inputs = {
            "input_ids": np.ascontiguousarray(tokens),
            "attention_mask": (np.arange(sequence) >= sequence - done).astype(np.int64),
            "past_length": np.minimum(self._positions, int(model.settings["context"])),
            "position_ids": np.maximum(done - np.arange(model.size, 0, -1), 0),
        }
        logits = model.run(inputs, self._past, self._present, self._device)
        self._past, self._present = self._present, self._past
        self._positions = done[:, 0]
        return logits


class _LoadedWindow:
    """One exported model, loaded."""

    def __init__(self, path: Path, providers: Sequence[str], threads: int | None, prepack: bool) -> None:
        options = ort.SessionOptions()
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")  # float activations
        if not prepack:
            options.add_session_config_entry("session.disable_prepacking", "1")  # weights stay memory-mapped
        if threads:
            options.intra_op_num_threads = threads
        if not path.is_file():
            raise ModelError(f"the file {path} does not exist")
        if unknown := [name for name in providers if name not in ort.get_available_providers()]:
            raise ConfigError(
                f"ONNX Runtime has no provider {unknown[0]!r} here; available: "
                f"{', '.join(ort.get_available_providers())}"
            )
        try:
            model = read_proto(path) if path.is_symlink() else path  # in a hub's cache, the data files are links too
            self._session = open_session(model, options, providers)
        except Exception as error:  # onnxruntime raises a dozen unrelated types
            raise ModelError(f"ONNX Runtime cannot load {path}: {_in_a_line(error)}") from error
        self.provider = self._session.get_providers()[0]
        metadata = self._session.get_modelmeta().custom_metadata_map
        try:
            found = json.loads(metadata.get(SETTINGS_KEY, "{}"))
            self.plan = json.loads(metadata.get(PLAN_KEY, "{}"))
            is_window = found.get("form") == "window" and found.keys() >= _SETTINGS and "context_length" in self.plan
        except (ValueError, AttributeError, TypeError) as error:
            raise ModelError(f"the metadata of {path} is damaged ({error}); export it again") from error
        if not is_window:
            raise ModelError(
                f"{path} is not a fixed window; expected a file that `chunkrt export` wrote without --dynamic"
            )
        self.settings: Mapping[str, Any] = found
        self.size = int(found["window"])
        self.batch, self.has_cache = int(found.get("batch", 1)), bool(found.get("cache", True))
        self.gives_last_only = found.get("logits") == "last"
        is_endless = found["keys"] == "pre-rope"
        self.num_positions = None if is_endless else int(self.plan["context_length"])
        inputs = {value.name: value for value in self._session.get_inputs()}
        self._vocab_size = next(v.shape[-1] for v in self._session.get_outputs() if v.name == "logits")
        self._inputs = [name for name in inputs if not name.startswith(_PAST)]
        self.states = {
            name.removeprefix(_PAST): (tuple(value.shape), _TYPES[value.type])
            for name, value in inputs.items()
            if name.startswith(_PAST)
        }

    def checked(self, token_ids: Sequence[int]) -> NDArray[np.int64]:
        """Return tokens as an array. Raises ConfigError if there are no tokens, or if a token is not in the
        vocabulary.
        """
        tokens = np.asarray(token_ids)
        if not tokens.size:
            raise ConfigError("no tokens to run")
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise ConfigError(f"token ids are {tokens.dtype} {list(tokens.shape)}, expected a list of whole numbers")
        if outside := [int(token) for token in tokens if not 0 <= token < self._vocab_size]:
            raise ConfigError(f"token id {outside[0]} is not in the vocabulary of {self._vocab_size}")
        return tokens.astype(np.int64)

    def run(
        self,
        inputs: Mapping[str, NDArray[np.int64]],
        past: Mapping[str, ort.OrtValue],
        present: Mapping[str, ort.OrtValue],
        device: str,
    ) -> NDArray[Any]:
        """Run the model, fill `present`, and return logits [B, W or 1, vocabulary]."""
        binding = self._session.io_binding()
        for name in self._inputs:
            binding.bind_cpu_input(name, inputs[name])
        for name in self.states:
            binding.bind_ortvalue_input(_PAST + name, past[name])
            binding.bind_ortvalue_output(_PRESENT + name, present[name])
        binding.bind_output("logits")
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:
            raise BackendError(f"ONNX Runtime failed: {_in_a_line(error)}") from error
        return cast(NDArray[Any], binding.get_outputs()[-1].numpy())


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())
