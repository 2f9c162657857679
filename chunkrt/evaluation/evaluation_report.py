"""Results of an evaluation with its exact configuration, as data for JSON and as readable lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from chunkrt.engine.engine import Engine
from chunkrt.engine.executors import origin_with
from chunkrt.evaluation.baseline import Baseline
from chunkrt.evaluation.hellaswag import HellaSwagFigures
from chunkrt.evaluation.lambada import LambadaFigures
from chunkrt.evaluation.layers import LayersRun
from chunkrt.evaluation.scored_items import Accuracy
from chunkrt.evaluation.text import TextFigures
from chunkrt.quant.scheme import Scheme
from chunkrt.runtime.policy import find_policy
from chunkrt.runtime.record import Origin

Figures = TypeVar("Figures")


@dataclass(frozen=True, kw_only=True)
class EvaluationRun:
    """The evaluated model and its configuration.

    Attributes:
        checkpoint: digest of the checkpoint's files; empty if it is unknown.
        quantisation: the complete scheme, with the shadows that a search chose.
        npu, cpu: backends of the two roles.
        origin: "emulated" if the NPU is emulated.
    """

    model: str
    checkpoint: str
    scheme: str
    quantisation: Scheme
    npu: str
    cpu: str
    chunk: int
    policy: str
    threads: int
    origin: Origin

    @staticmethod
    def of(engine: Engine, model: str) -> EvaluationRun:
        """Describe a loaded model under the name that the user gave."""
        return EvaluationRun(
            model=model,
            checkpoint=engine.loaded.manifest.checkpoint,
            scheme=engine.scheme.name,
            quantisation=engine.scheme,
            npu=engine.loaded.npu_backend.name,
            cpu=engine.loaded.cpu_backend.name,
            chunk=engine.chunk_length,
            policy=find_policy(engine.options.policy).name,
            threads=engine.options.num_threads,
            origin=origin_with(engine.loaded.npu_backend),
        )


@dataclass(frozen=True, kw_only=True)
class BaseRun:
    """The base of a comparison. Windows are `read` from the disk or `computed`; some computed windows were
    `not_kept`."""

    model: str
    scheme: str
    backend: str
    read: int
    computed: int
    not_kept: int

    @staticmethod
    def of(base: Baseline) -> BaseRun:
        """Describe a base after its windows were used."""
        return BaseRun(
            model=base.model,
            scheme=str(base.options.scheme),
            backend=base.options.npu,
            read=base.num_read,
            computed=base.num_computed,
            not_kept=base.num_not_kept,
        )


@dataclass(frozen=True, kw_only=True)
class TextRun:
    """A text, its evaluated part, and the results. The part is given by the numbers of evaluated and available windows
    and the longest length of a window in tokens.
    """

    file: str
    part: str
    windows: int
    windows_available: int
    window_length: int
    has_bos: bool
    base: BaseRun | None
    figures: TextFigures


@dataclass(frozen=True, kw_only=True)
class TaskRun(Generic[Figures]):
    """The file of a task, and the results."""

    file: str
    figures: Figures


@dataclass(frozen=True, kw_only=True)
class Report:
    """All results of one evaluation; those that were not requested are None."""

    run: EvaluationRun
    text: TextRun | None
    layers: LayersRun | None
    hellaswag: TaskRun[HellaSwagFigures] | None
    lambada: TaskRun[LambadaFigures] | None

    def lines(self) -> Iterator[str]:
        """Return a readable report."""
        run = self.run
        backends = run.npu if run.npu == run.cpu else f"{run.npu} and {run.cpu}"
        yield f"{run.model}: {run.scheme} on {backends}, chunks of {run.chunk}, {run.policy}, {run.threads} threads"
        if self.text:
            yield ""
            yield from _text_lines(self.text)
        if self.layers:
            yield ""
            yield from self.layers.lines()
        if self.hellaswag:
            endings = self.hellaswag.figures
            yield ""
            yield f"HellaSwag, {self.hellaswag.file}: {endings.num_items} items"
            yield _row("accuracy", _accuracy(endings.accuracy))
            yield _row("length-normalised", _accuracy(endings.normalised_accuracy))
        if self.lambada:
            words = self.lambada.figures
            yield ""
            yield f"LAMBADA, {self.lambada.file}: {words.num_items} items"
            yield _row("accuracy", _accuracy(words.accuracy))
            yield _row("perplexity of words", f"{words.perplexity:.2f}")


def _text_lines(text: TextRun) -> Iterator[str]:
    figures, base = text.figures, text.base
    yield f"{text.file}, part {text.part}: {text.windows} of {text.windows_available} windows of {text.window_length}"
    if base:
        kept = f" ({base.not_kept} of them not kept: beyond --cache-limit)" if base.not_kept else ""
        yield (
            f"base: {base.model}, {base.scheme} on {base.backend}; {base.read} windows from the cache, "
            f"{base.computed} computed{kept}"
        )
    yield _row("perplexity", f"{figures.perplexity:.4f}")
    if compared := figures.comparison:
        yield _row("base perplexity", f"{compared.perplexity:.4f}")
        yield _row("ratio", f"{compared.ratio:.4f}")
        yield _row("mean KL divergence", f"{compared.mean_kl:.5f}", "nats")
        yield _row("99 % of tokens below", f"{compared.kl_99:.4f}", "nats")
        yield _row("largest", f"{compared.largest_kl:.4f}", "nats")
        yield _row("top-1 agreement", f"{compared.top_1:.4f}")
    first = "but the beginning token" if text.has_bos else "but each window's first"
    yield _row("tokens counted", f"{figures.num_tokens}", f"all {first}")
    yield _row("tokens per second", f"{figures.tokens_per_second:.0f}", "prefill with all logits")


def _accuracy(accuracy: Accuracy) -> str:
    error = "" if accuracy.standard_error is None else f" ± {accuracy.standard_error:.4f}"
    return f"{accuracy.value:.4f}{error}"


def _row(name: str, value: str, unit: str = "") -> str:
    return f"  {name:<22}{value:>10}  {unit}".rstrip()
