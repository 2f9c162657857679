"""Search for the quantisation of every linear, by the measured loss of each choice on the calibration text.

    shadow   all linears in 8 bits, with the fewest shadows that keep the loss within the budget
    mixed    first the most multiply-adds in 8 bits (the others in 16), then the fewest shadows, then the fewest bytes:
             of the linears in 16 bits, the most with 4-bit weights

The search is greedy. The loss of every linear is measured alone, for each choice, and the linears are ordered by loss.
Along that order, bisection finds the shortest prefix that yields a scheme within the budget; each scheme is measured as
a whole. The loss of the chosen scheme is therefore within the budget, but a better scheme may exist.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.checkpoints import catalogue
from chunkrt.checkpoints.adapters import adapter_of
from chunkrt.compile.calibrate import WINDOW_LENGTH, calibrate, text_digest
from chunkrt.compile.trials import Loss, Losses
from chunkrt.engine_directory.content import cache_key, keyed_path
from chunkrt.errors import ConfigError, ModelError, QuantizationError, cause_of
from chunkrt.files import Count, cached_entry, read_json, written_aside
from chunkrt.quant.calibration import FORMAT, SHADOW_SHARE, Calibration, num_hot_channels
from chunkrt.quant.scheme import BLOCK_LENGTH, CHOICE_FORMAT, Recipe, Scheme, Search

if TYPE_CHECKING:
    from chunkrt.graph.partition import Planned

Float32 = NDArray[np.float32]
TokenIds = NDArray[np.int64]

NUM_FRONTIER = 6
"""Number of parts of the order at whose ends schemes are measured in addition to those of the bisection."""

NEGLIGIBLE = 0.05
"""Fraction of the budget, divided evenly among the linears. A linear whose loss alone is below its part gets no
shadow.
"""

HELD_OUT_EVERY = 8
"""Interval of the calibration text's windows that a search does not use for grids, but to measure losses."""

NUM_WINDOWS, SEARCH_WINDOW_LENGTH = 4, 256
"""Limits of a trial's windows: the number of windows, and their length in tokens."""

FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class LinearChoice:
    """One linear in a search.

    Attributes:
        reach: the largest magnitude of the input divided by the step of its grid with a shadow, which ends at 127
            steps.
        kl: mean KL divergence if only this linear is in 8 bits.
        kl_shadowed: mean KL divergence if this linear also has a shadow; None if it was not measured because kl is
            negligible.
        activation_bits, weight_bits, has_shadow: the choice.
        shadow_bytes: bytes of the rows that the shadow keeps in float32; 0 without a shadow.
        shadow_multiply_adds: average number of the shadow's multiply-adds for a row; 0 without a shadow.
    """

    weight: str
    reach: float
    kl: float
    kl_shadowed: float | None
    activation_bits: int
    weight_bits: int
    has_shadow: bool
    multiply_adds: int
    shadow_bytes: int
    shadow_multiply_adds: float


@dataclass(frozen=True, kw_only=True)
class FrontierPoint:
    """One measured scheme along a search's order: its share of multiply-adds with 8-bit activations, numbers of shadows
    and of linears with 4-bit weights, and its loss.
    """

    share_in_8_bits: float
    num_shadows: int
    num_with_4_bits: int
    kl: float
    perplexity_ratio: float


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Result of a search: the scheme, its loss on the calibration text, the searched linears in the plan's order, and
    all schemes that were measured as a whole."""

    scheme: Scheme
    budget: float
    loss: Loss
    linears: Sequence[LinearChoice]
    frontier: Sequence[FrontierPoint]

    def to_dict(self) -> dict[str, Any]:
        """Return the choice as a dictionary for JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Choice:
        """Return the choice from a result of `to_dict`. Raises TypeError, KeyError or AttributeError for other data."""
        return Choice(
            scheme=Scheme.from_dict(data["scheme"]),
            budget=data["budget"],
            loss=Loss(**data["loss"]),
            linears=[LinearChoice(**linear) for linear in data["linears"]],
            frontier=[FrontierPoint(**point) for point in data["frontier"]],
        )


def cached_choice(
    planned: Planned,
    checkpoint: Path,
    recipe: Recipe,
    calibration: Calibration,
    *,
    progress: Count = lambda done, total: None,
) -> tuple[Choice, Path]:
    """Return the result of a recipe's search for a checkpoint, from the cache next to the calibrations if it is stored
    there; otherwise search and store the result.

    Args:
        planned: the checkpoint without placement and shadows.
        calibration: calibration for the recipe's scheme. The search makes its own grids from one part of the
            calibration's text, and measures on another part; an engine's grids are made from the complete text.

    Returns:
        The choice, and the JSON file that holds it.

    Raises:
        ConfigError: the text is too short.
        QuantizationError: see `choose`.
        ModelError: the file cannot be written.
    """
    settings = {
        "recipe": asdict(recipe),
        "text": text_digest(calibration.token_ids),
        "method": calibration.method,
        "folding": calibration.folding.digest(),
    }
    adapter = adapter_of(planned.source)
    key = cache_key(checkpoint, adapter=adapter, format=CHOICE_FORMAT, calibration_format=FORMAT, **settings)
    folder = catalogue.home() / "calibrations"
    path = keyed_path(folder, checkpoint, key, kind=f"-{recipe.scheme.name}", suffix=".json")

    short = planned.within(WINDOW_LENGTH)

    def load(name: str) -> Float32:
        return calibration.folding.apply(name, short.load(name))

    def read(path: Path) -> Choice:
        return Choice.from_dict(read_json(path))

    try:
        with cached_entry(path, "choosing schemes", read) as choice:
            if choice is None:
                assert recipe.search is not None
                assert recipe.budget is not None
                kept, windows = held_out(calibration.token_ids, planned.plan.context_length)
                grids = calibrate(short.plan, load, kept, model=calibration.model, method=calibration.method)
                losses = Losses(short.plan, load, grids, windows)
                choice = choose(losses, recipe.scheme, recipe.search, recipe.budget, progress=progress)
                with written_aside(path) as aside:
                    aside.write_text(json.dumps(choice.to_dict(), indent=1), encoding="utf-8")
        return choice, path
    except OSError as error:
        raise ModelError(f"cannot write {path}: {cause_of(error)}") from error


def held_out(token_ids: TokenIds, context_length: int) -> tuple[TokenIds, list[TokenIds]]:
    """Split a text into tokens for the grids of a search, and windows of other tokens to measure losses.

    A search must not measure on the text that made the grids: shadows are for values that exceed the grids, and no
    value of that text does.

    Args:
        token_ids: int64 [n].
        context_length: of the model.

    Returns:
        The tokens without every HELD_OUT_EVERY-th window of WINDOW_LENGTH (of fewer windows, without the last; of a
        single window, without its second half); and at most NUM_WINDOWS windows of 2 to SEARCH_WINDOW_LENGTH tokens,
        spread over the omitted tokens.

    Raises:
        ConfigError: the text has fewer than 4 tokens.
    """
    if token_ids.size < 4:
        raise ConfigError(
            f"the calibration text has {token_ids.size} tokens, but a search for schemes needs at least 4"
        )
    length = min(WINDOW_LENGTH, context_length, token_ids.size // 2)
    parts = np.split(token_ids, range(length, token_ids.size, length))
    parts = [part for part in parts if part.size >= 2]
    others = parts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY] or parts[-1:]
    pieces = [
        piece
        for part in others
        for piece in np.split(part, range(SEARCH_WINDOW_LENGTH, part.size, SEARCH_WINDOW_LENGTH))
    ]
    pieces = [piece for piece in pieces if piece.size >= 2]
    chosen = sorted({round(i * (len(pieces) - 1) / (NUM_WINDOWS - 1)) for i in range(NUM_WINDOWS)})
    kept = [part for part in parts if not any(part is other for other in others)]
    return np.concatenate(kept), [pieces[index] for index in chosen]


def choose(
    losses: Losses, scheme: Scheme, search: Search, budget: float, *, progress: Count = lambda done, total: None
) -> Choice:
    """Search for the scheme.

    Args:
        scheme: a scheme with 8-bit static linears; linears that it names as wide stay wide.
        budget: the largest mean KL divergence, in nats, on the windows of `losses`.
        progress: called with (trials done, trials expected); the expected number grows once the linears with 16 bits
            are known.

    Raises:
        QuantizationError: even the most careful choice exceeds the budget.
    """
    return _Search(losses, scheme, search, budget, progress).run()


class _Search:
    def __init__(self, losses: Losses, scheme: Scheme, search: Search, budget: float, progress: Count) -> None:
        self._losses, self._scheme, self._search = losses, scheme, search
        self._budget, self._progress = budget, progress
        self._candidates = [name for name in losses.linears if scheme.activation_bits_of(name) == 8]
        self._expected = 2 * len(self._candidates) + 2 * len(self._candidates).bit_length() + NUM_FRONTIER
        self._num_trials = 0
        self._points: dict[Scheme, Loss] = {}
        """All schemes that were measured as a whole."""

    def run(self) -> Choice:
        """See `choose`."""
        everywhere = replace(self._scheme, shadowed=("*",))
        alone = {name: self._trial(self._scheme, [name]).kl for name in self._candidates}
        negligible = NEGLIGIBLE * self._budget / len(self._candidates)
        beside = {name: self._trial(everywhere, [name]).kl for name in self._candidates if alone[name] > negligible}
        gains = {name: alone[name] - kl for name, kl in beside.items() if kl < alone[name]}
        wide: list[str] = []
        if self._search == "mixed":
            rest = {name: alone[name] - gains.get(name, 0) for name in self._candidates}
            worst = sorted(rest, key=lambda name: -rest[name] / self._losses.multiply_adds[name])
            wide = worst[: self._least(len(worst), lambda count: self._variant(worst[:count], list(gains)))]
        helped = sorted((name for name in gains if name not in wide), key=lambda name: -gains[name])
        count = self._least(len(helped), lambda count: self._variant(wide, helped[:count]))
        shadowed = helped[:count]
        chosen = self._variant(wide, shadowed, self._with_4_bits(wide, shadowed))
        order = worst if self._search == "mixed" else helped
        for index in range(NUM_FRONTIER + 1):
            part = order[: round(index * len(order) / NUM_FRONTIER)]
            self._measure(self._variant(part, list(gains)) if self._search == "mixed" else self._variant([], part))
        self._progress(self._expected, self._expected)
        return Choice(
            scheme=chosen,
            budget=self._budget,
            loss=self._points[chosen],
            linears=[self._linear(name, chosen, alone[name], beside.get(name)) for name in self._candidates],
            frontier=sorted(
                (self._point(*point) for point in self._points.items()),
                key=lambda point: (-point.share_in_8_bits, point.num_shadows, -point.num_with_4_bits),
            ),
        )

    def _with_4_bits(self, wide: Sequence[str], shadowed: Sequence[str]) -> list[str]:
        """Return the 16-bit linears that get 4-bit weights, which save the most bytes for the least loss."""
        fitting = [name for name in wide if int(self._losses.plan.tensors[name].shape[0]) % BLOCK_LENGTH == 0]
        self._expected += len(fitting) + len(fitting).bit_length()
        alone = {name: self._trial(self._variant(wide, (), fitting), [name]).kl for name in fitting}
        worst = sorted(fitting, key=lambda name: -alone[name] / self._losses.multiply_adds[name])
        return worst[self._least(len(worst), lambda count: self._variant(wide, shadowed, worst[count:])) :]

    def _variant(self, wide: Sequence[str], shadowed: Sequence[str], with_4_bits: Sequence[str] = ()) -> Scheme:
        """Return the scheme in which some linears have 16 bits, some of these have 4-bit weights, and some other
        linears have shadows.
        """
        narrow = tuple(name for name in self._candidates if name in set(shadowed) - set(wide))
        scheme = replace(self._scheme, wide=(*self._scheme.wide, *wide), shadowed=narrow)
        if not with_4_bits:
            return scheme
        others = tuple(name for name in self._losses.linears if name not in with_4_bits)
        return replace(scheme, weight_bits=4, weights_of_8_bits=others)

    def _least(self, most: int, scheme_at: Callable[[int], Scheme]) -> int:
        """Return the smallest count from 0 to `most` whose scheme has a measured loss within the budget, by
        bisection.
        """
        low, high = -1, most
        if (least := self._measure(scheme_at(most)).kl) > self._budget:
            remedy = "use `scheme='mixed'`" if self._search == "shadow" else "raise the budget"
            raise QuantizationError(
                f"the most careful choice still has a mean KL divergence of {least:.4g} on the calibration text, above "
                f"the budget of {self._budget:g}; {remedy}"
            )
        while high - low > 1:
            middle = (low + high) // 2
            if self._measure(scheme_at(middle)).kl <= self._budget:
                high = middle
            else:
                low = middle
        return high

    def _measure(self, scheme: Scheme) -> Loss:
        if scheme not in self._points:
            self._points[scheme] = self._trial(scheme, None)
        return self._points[scheme]

    def _trial(self, scheme: Scheme, only: Sequence[str] | None) -> Loss:
        self._progress(min(self._num_trials, self._expected), self._expected)
        self._num_trials += 1
        return self._losses.of(scheme, only)

    def _linear(self, name: str, scheme: Scheme, kl: float, kl_shadowed: float | None) -> LinearChoice:
        depth, columns = (int(size) for size in self._losses.plan.tensors[name].shape)
        has_shadow = scheme.is_shadowed(name)
        return LinearChoice(
            weight=name,
            reach=self._losses.reach(name),
            kl=kl,
            kl_shadowed=kl_shadowed,
            activation_bits=scheme.activation_bits_of(name),
            weight_bits=8 if scheme.weight_bits_of(name) == 8 else 4,
            has_shadow=has_shadow,
            multiply_adds=depth * columns,
            shadow_bytes=has_shadow * num_hot_channels(depth) * columns * FLOAT32_BYTES,
            shadow_multiply_adds=has_shadow * SHADOW_SHARE * depth * columns,
        )

    def _point(self, scheme: Scheme, loss: Loss) -> FrontierPoint:
        sizes = self._losses.multiply_adds
        narrow = sum(size for name, size in sizes.items() if scheme.activation_bits_of(name) == 8)
        return FrontierPoint(
            share_in_8_bits=narrow / sum(sizes.values()),
            num_shadows=sum(scheme.is_shadowed(name) for name in sizes),
            num_with_4_bits=sum(scheme.weight_bits_of(name) == 4 for name in sizes),
            kl=loss.kl,
            perplexity_ratio=loss.perplexity_ratio,
        )
