"""A chunkrt engine as a model of lm-evaluation-harness, which has hundreds of tasks.

The harness accepts only models that are registered in its process, so it has to be started with this command:

    python -m chunkrt.evaluation.harness --model chunkrt --model_args pretrained=MODEL,npu=native --tasks hellaswag

`pretrained` is chunkrt's MODEL; the other arguments are fields of `EngineOptions`. In Python, import this module, then
call `lm_eval.simple_evaluate(model="chunkrt", ...)`. The adapter needs `pip install "chunkrt[lm-eval]"`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import chunkrt
from chunkrt.engine.sampling import SamplingOptions
from chunkrt.errors import ChunkrtError, ConfigError

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm
except ImportError as error:
    missing = f'the adapter needs lm-evaluation-harness ({error.name} is missing): pip install "chunkrt[lm-eval]"'
    if __name__ == "__main__":
        sys.exit(f"chunkrt: {missing}")
    raise ConfigError(missing) from error

DEFAULT_NEW_TOKENS = 256
NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names that tasks use for the maximum number of new tokens; the first name that is present counts, as in the
harness."""

log = logging.getLogger(__name__)


@register_model("chunkrt")
class ChunkrtLM(TemplateLM):  # type: ignore[misc]  # the harness is not installed where types are checked
    """A model of the harness that scores many requests at once, and generates answers one after another.

    Args:
        pretrained: a catalogue name, a checkpoint, or an engine directory.
        batch_size, max_batch_size, device: arguments that the harness passes to every model; they are ignored.
        options: fields of `EngineOptions`.

    Raises:
        ChunkrtError: see `chunkrt.load`; ModelError also if the model has no tokenizer.
    """

    def __init__(
        self,
        pretrained: str,
        batch_size: object = 1,
        max_batch_size: object = None,
        device: object = None,
        **options: Any,
    ) -> None:
        super().__init__()
        for name in ("placement", "calibration"):
            if name in options:
                options[name] = Path(options[name])
        self.engine = chunkrt.load(pretrained, **options)
        self.text = self.engine.tokenizer

    @property
    def max_length(self) -> int:
        """Maximum number of positions of a request."""
        return self.engine.context_length

    @property
    def eot_token_id(self) -> int:
        """Id of the token that ends a text."""
        if not (ids := self.text.settings.eos_ids):
            raise ConfigError(
                f"{self.engine.loaded.manifest.model} names no token that ends a text, which the harness needs"
            )
        return ids[0]

    @property
    def prefix_token_id(self) -> int:
        """Id of the token before a text without a context: the beginning token, or otherwise the token that ends
        texts."""
        bos_id = self.text.settings.bos_id
        return self.eot_token_id if bos_id is None else bos_id

    @property
    def tokenizer_name(self) -> str:
        """Name of this model in the harness's caches."""
        return str(self.engine.loaded.manifest.model)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the template's source, for the harness's report."""
        return self.text.settings.chat_template or ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation as text. Raise ModelError if the model has no template, or the template refuses it."""
        return self.text.apply_chat_template(chat_history, add_generation_prompt=add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """Return the tokens of a text, including parsed control tokens. Add a second beginning token only on
        request."""
        ids = self.text.encode(string, add_special=add_special_tokens is not False, parse_special=True)
        bos_id = self.text.settings.bos_id
        is_doubled = self.text.settings.add_bos and ids[:2] == [bos_id, bos_id]
        return ids[1:] if add_special_tokens is None and is_doubled else ids

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return log-probabilities of complete texts. Each token is predicted once, in windows of the context
        length."""
        found = []
        for request in tqdm(requests, desc="rolling", disable=disable_tqdm):
            tokens = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            # Windows run one at a time: they have no common tokens, and all of their rows need logits.
            scores = self.engine.score([make_disjoint_window(window) for window in windows], max_sessions=1)
            found.append(sum(score.log_probability for score in scores))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found[-1])
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue texts until a stop string or the end of a text, greedily unless a task samples."""
        found = []
        for request in tqdm(requests, desc="generating", disable=disable_tqdm):
            context, settings = request.args
            found.append(self._generate(context, settings))
            self.cache_hook.add_partial("generate_until", request.args, found[-1])
        return found

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: object,
    ) -> list[tuple[float, bool]]:
        pairs = [
            (self._shortened(context, self.max_length + 1 - len(continuation)), continuation)
            for _, context, continuation in requests
        ]
        found: dict[int, tuple[float, bool]] = {}
        for index, score in tqdm(self.engine.scores(pairs), desc="scoring", total=len(pairs), disable=disable_tqdm):
            found[index] = score.log_probability, score.is_greedy
            if (texts := requests[index][0]) is not None:
                self.cache_hook.add_partial("loglikelihood", texts, found[index])
        return [found[index] for index in range(len(pairs))]

    def _generate(self, context: str, settings: Mapping[str, Any]) -> str:
        max_new_tokens = next((int(settings[name]) for name in NEW_TOKENS if name in settings), DEFAULT_NEW_TOKENS)
        stops = settings.get("until") or []
        tokens = self.tok_encode(context) or [self.prefix_token_id]
        with self.engine.session() as session:
            session.prefill(self._shortened(tokens, self.max_length - max_new_tokens))
            pieces = session.generate(
                max_new_tokens=max_new_tokens,
                sampling=_sampling(settings),
                stop=[stops] if isinstance(stops, str) else list(stops),
            )
            return "".join(piece.text for piece in pieces)

    def _shortened(self, tokens: list[int], room: int) -> list[int]:
        """Return the last tokens that fit. Other models of the harness do the same, but without a warning."""
        if room < 1:
            raise ConfigError(f"a request does not fit the context of {self.max_length}; give a larger context_length")
        if len(tokens) > room:
            log.warning("a context of %d tokens is truncated to its last %d", len(tokens), room)
        return tokens[-room:]


def _sampling(settings: Mapping[str, Any]) -> SamplingOptions:
    """Return greedy options, unless the task samples at a temperature."""
    temperature = float(settings.get("temperature", 0.0))
    if not settings.get("do_sample", temperature > 0) or temperature == 0:
        return SamplingOptions()
    chosen = {name: settings[name] for name in ("top_k", "top_p", "min_p") if settings.get(name) is not None}
    return SamplingOptions(temperature=temperature, **chosen)


def main() -> None:
    """Run the harness's own command line, with chunkrt among its models."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except ChunkrtError as error:
        sys.exit(f"chunkrt: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
