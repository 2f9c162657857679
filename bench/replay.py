"""Published figures, predicted by the simulator with profiles that were fitted without them.

    python bench/replay.py              # leave one system out: every figure, and a summary for each system
    python bench/replay.py --terms      # the terms of a chunk's time: fits with some of them left out
    python bench/replay.py --bundled    # the errors of the profiles in devices/, which were not fitted to any of them
    python bench/replay.py --fit        # fit the profiles of software/ and socs.toml to all figures, and write them

`published.csv` lists the figures with their operating points. A figure that another source contradicts is set aside,
with that source. In turn, each system is left out: the profiles are fitted to the figures of the others and predict its
own. AI Hub is left out by SoC, together with all other figures of that SoC's NPU, as for an SoC without any
measurement. A last split fits six models in Q4_0 of PocketPal with the others, and predicts the rest of PocketPal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
from published import FLOORS, HEXAGON, Figure, Prediction, predict, read_figures
from published_fit import FACTS, NUMBERS, Fit, fit, nominal

from chunkrt.simulate import DEVICES, DeviceProfile, compose, find_device
from chunkrt.simulate.compose import soc_facts
from chunkrt.simulate.toml_tables import ENDS

QNN_SYSTEMS = ("AI Hub", "PowerServe", "mllm v2")
HEXAGON_FIT = ("G5", "H27")
POCKETPAL_FIT = ("qwen2.5-1.5b", "qwen3-1.7b", "phi-3.5-mini", "smollm2-1.7b", "gemma-3-1b", "lfm2.5-1.2b")
SHARED = ("genie", "executorch")
"""Software that is fitted together, because it shares numbers."""

LEAST_CHANGE = 0.005
"""Least relative change of a fact that is written."""

GOALS = (0.15, 0.35, 0.8)
SIMULATE = Path(compose.__file__).parent


@dataclass(frozen=True, kw_only=True)
class Split:
    """Figures that are left out together.

    Attributes:
        is_held: returns True for a figure that is predicted.
        is_unseen: returns True for a figure that is not fitted either, e.g. another one of the same NPU.
    """

    name: str
    is_held: Callable[[Figure], bool]
    is_unseen: Callable[[Figure], bool]


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A figure that was left out, and its prediction.

    Attributes:
        deviation: of the prediction's logarithm, by the parameters of the profile.
    """

    split: str
    figure: Figure
    prediction: Prediction
    deviation: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.prediction.rate / self.figure.published - 1

    def needed_error(self) -> float:
        """Return the least error of the model with which the interval holds the figure."""
        low, high = self.prediction.ends
        distance = max(0.0, math.log(low / self.figure.published), math.log(self.figure.published / high))
        return math.sqrt(max(0.0, (distance / ENDS) ** 2 - self.deviation**2))

    def interval(self, model_error: float) -> tuple[float, float]:
        """Return the ends of the prediction."""
        factor = math.exp(ENDS * math.hypot(self.deviation, model_error))
        return self.prediction.ends[0] / factor, self.prediction.ends[1] * factor

    def is_held(self, model_error: float) -> bool:
        """Return True if the interval holds the figure."""
        low, high = self.interval(model_error)
        return low <= self.figure.published <= high


def splits(figures: Sequence[Figure]) -> list[Split]:
    """Return all splits."""

    def of_soc(soc: str) -> Split:
        return Split(
            name=f"AI Hub, {soc}",
            is_held=lambda f: f.system == "AI Hub" and f.soc == soc,
            is_unseen=lambda f: f.on == "npu" and f.soc == soc,
        )

    def of_system(system: str) -> Split:
        def is_held(figure: Figure) -> bool:
            return figure.system == system

        return Split(name=system, is_held=is_held, is_unseen=lambda f: f.system.startswith(system))

    def is_rest(figure: Figure) -> bool:
        in_fit = figure.weights == "q4_0" and figure.model in POCKETPAL_FIT
        return figure.system == "PocketPal" and not in_fit

    socs = sorted({f.soc for f in figures if f.system == "AI Hub"})
    systems = ["PowerServe", "mllm v2", "ExecuTorch", "GenieX", "PocketPal"]
    systems += sorted({f.system for f in figures if f.on == "cpu"} - {"PocketPal"})
    rest = Split(name="PocketPal, Q8_0 and five models", is_held=is_rest, is_unseen=is_rest)
    shape = Split(
        name="llama.cpp Hexagon, other prompt lengths",
        is_held=lambda f: f.system == HEXAGON and f.id not in HEXAGON_FIT,
        is_unseen=lambda f: f.system == HEXAGON and f.id not in HEXAGON_FIT,
    )
    return [*map(of_soc, socs), *map(of_system, systems), rest, shape]


def leave_out(split: Split, figures: Sequence[Figure]) -> list[HeldOut]:
    """Fit without a split's figures, and predict them."""
    held = [figure for figure in figures if split.is_held(figure)]
    softwares = {figure.software for figure in held}
    if not softwares.isdisjoint(SHARED):
        softwares |= {*SHARED}
    fitted = fit([f for f in figures if f.software in softwares and not (split.is_unseen(f) or split.is_held(f))])
    found: list[HeldOut] = []
    for figure in held:
        prediction = predict(figure, fitted.profile(figure.soc, figure.software))
        assert prediction.simulation.interval is not None
        low, high = prediction.simulation.interval.tokens_per_s
        deviation = math.log(high / low) / (2 * ENDS)
        found.append(HeldOut(split=split.name, figure=figure, prediction=prediction, deviation=deviation))
    return found


def model_error(predictions: Sequence[HeldOut]) -> float:
    """Return the least error of the model with which the intervals hold 80 % of the figures."""
    needed = sorted(p.needed_error() for p in predictions)
    return needed[min(len(needed) - 1, math.ceil(GOALS[2] * len(needed)) - 1)]


def report(predictions: Sequence[HeldOut]) -> None:
    """Print every figure, and a summary for each split."""
    line = "{:5} {:10} {:9} {:29} {:6} {:8} {:>9} {:>9} {:>7}  {}"
    click.echo(line.format("row", "", "SoC", "model", "format", "rate", "published", "predicted", "error", "80 %"))
    summary: list[str] = []
    names = list(dict.fromkeys(p.split for p in predictions))
    for name in names:
        own = [p for p in predictions if p.split == name]
        software = {p.figure.software for p in own}
        if not software.isdisjoint(SHARED):
            software |= {*SHARED}
        others = [p for p in predictions if p.split != name and p.figure.software in software and "five" not in p.split]
        error = model_error(others or own)
        click.echo(f"left out: {name}; model error {error:.2f} by the other splits")
        for p in own:
            f, (low, high) = p.figure, p.interval(error)
            figures = (f"{f.published:g}", f"{p.prediction.rate:.1f}", f"{p.error:+.0%}", f"{low:.1f} to {high:.1f}")
            click.echo(line.format(f.id, "", f.soc, f.model, f.weights, f.metric, *figures))
        for metric in ("prefill", "decode"):
            errors = [abs(p.error) for p in own if p.figure.metric == metric]
            if errors:
                kept = [p for p in own if p.figure.metric == metric]
                within = sum(p.is_held(error) for p in kept)
                summary.append(
                    f"| {name} | {metric} | {len(errors)} | {median(errors):.0%} | {max(errors):.0%} | "
                    f"{within} of {len(errors)} |"
                )
    click.echo("\n| left out | rate | figures | median error | worst | in the interval |")
    click.echo("| --- | --- | ---: | ---: | ---: | ---: |")
    click.echo("\n".join(summary))
    main = [p for p in predictions if "five" not in p.split]
    errors = [abs(p.error) for p in main]
    click.echo(f"all {len(main)} figures: median {median(errors):.0%}, worst {max(errors):.0%}")
    for name in sorted({p.figure.software for p in main}):
        own = [p for p in main if p.figure.software == name]
        errors = [abs(p.error) for p in own]
        within = sum(error <= GOALS[1] for error in errors)
        click.echo(
            f"{name}: {len(own)} figures, median {median(errors):.0%}, {within} within 35 %, worst "
            f"{max(errors):.0%}, model error {model_error(own):.2f}"
        )


SOFTMAX = "npu.operators.attention.softmax_g_per_s"
CACHE = "npu.operators.attention.gb_per_s"
VALUES = "npu.operators.other.gb_per_s"
TERMS: Mapping[str, tuple[Sequence[str], Mapping[str, tuple[float, float]]]] = {
    "all terms": ((), {}),
    "without softmax over the padded context": ((SOFTMAX,), {}),
    "without reading the padded caches": ((CACHE,), {}),
    "without the values between linears": ((VALUES,), {}),
    "without the three": ((SOFTMAX, CACHE, VALUES), {}),
    "a constant for each chunk in place of the three": ((SOFTMAX, CACHE, VALUES), {"prompt": (20_000, 5)}),
}


def report_terms(figures: Sequence[Figure]) -> None:
    """Print the errors of fits to AI Hub's chunks of 128 rows with some terms left out: in-sample, and on PowerServe,
    whose context is half as long."""
    chunks = [f for f in figures if (f.weights, f.chunk_length, f.metric) == ("w4a16", 128, "prefill")]
    chosen = [f for f in chunks if f.system == "AI Hub"]
    others = [f for f in chunks if f.system == "PowerServe"]
    click.echo(
        f"| model of a chunk | {len(chosen)} figures of AI Hub: median | root mean square | PowerServe: median |"
    )
    click.echo("| --- | ---: | ---: | ---: |")
    for name, (without, priors) in TERMS.items():
        fitted = fit(chosen, without, priors)

        def logs(figures: Sequence[Figure], fitted: Fit = fitted) -> list[float]:
            rates = [(predict(f, fitted.profile(f.soc, f.software)).rate, f.published) for f in figures]
            return [abs(math.log(rate / published)) for rate, published in rates]

        errors = logs(chosen)
        square = math.sqrt(sum(error**2 for error in errors) / len(errors))
        click.echo(f"| {name} | {median(errors):.1%} | {square:.1%} | {median(logs(others)):.1%} |")


def report_bundled(figures: Sequence[Figure]) -> None:
    """Print the errors of the profiles in devices/, on linears of 4-bit weights and 16-bit activations and on CPUs."""
    for name in DEVICES:
        device = find_device(name)
        assert isinstance(device, DeviceProfile)
        for on, systems in (("npu", QNN_SYSTEMS), ("cpu", None)):
            chosen = [
                f for f in figures if f.soc == device.soc and f.on == on and (systems is None or f.system in systems)
            ]
            errors = [predict(f, device).rate / f.published - 1 for f in chosen if f.weights != "w4f16"]
            if errors:
                middle = median(map(abs, errors))
                ends = f"{min(errors):+.0%} to {max(errors):+.0%}"
                click.echo(f"{name}, {on}: {len(errors)} figures, {ends}, median {middle:.0%}")


def write_fit(figures: Sequence[Figure]) -> None:
    """Fit all numbers to all figures, and write them into the files of software and of facts."""
    fitted = fit(figures)
    for software in {f.software for f in figures}:
        path = SIMULATE / "software" / f"{software}.toml"
        text = path.read_text(encoding="utf-8")
        for number in NUMBERS[software]:
            for place in number.paths:
                table, key = place.rsplit(".", 1) if "." in place else ("", place)
                value, ends = fitted.number(software, number)
                text = _written(text, table, key, value, ends)
        path.write_text(text, encoding="utf-8")
    path = SIMULATE / "socs.toml"
    text = path.read_text(encoding="utf-8")
    for soc in sorted({f.soc for f in figures}):
        for name in FACTS:
            value, ends = fitted.fact(soc, name)
            if abs(value / nominal(soc_facts()[soc][name]) - 1) > LEAST_CHANGE:
                text = _written(text, soc, name, value, ends, keeps_nominal=True)
    path.write_text(text, encoding="utf-8")


def _written(
    text: str, table: str, key: str, value: float, ends: Sequence[float], *, keeps_nominal: bool = False
) -> str:
    """Return a TOML text in which a parameter of one line has another value and range."""
    start = text.index(f"\n[{table}]\n") if f"\n[{table}]\n" in text else 0
    found = re.compile(rf"^{key} = \{{ (.*) \}}$", re.MULTILINE).search(text, start)
    if found is None:
        raise ValueError(f"no parameter {table}.{key} of one line")
    fields = dict(re.findall(r'(\w+) = (\[[^]]*\]|"[^"]*"|[^,]+)', found[1]))
    if keeps_nominal:
        fields.setdefault("nominal", fields["value"])
        if "range" in fields:
            fields.setdefault("nominal_range", fields["range"])
    fields["value"] = f"{value:.4g}"
    fields["range"] = f"[{min(ends):.4g}, {max(ends):.4g}]"
    line = ", ".join(f"{name} = {entry}" for name, entry in fields.items())
    return f"{text[: found.start()]}{key} = {{ {line} }}{text[found.end() :]}"


@click.command()
@click.option("--only", help="Leave out only the splits whose name contains this regular expression.")
@click.option("--terms", "is_terms", is_flag=True, help="Fit with some terms of the model left out.")
@click.option("--bundled", "is_bundled", is_flag=True, help="Predict with the profiles in devices/.")
@click.option("--fit", "is_fit", is_flag=True, help="Fit the shipped profiles to all figures, and write them.")
def replay(only: str | None, is_terms: bool, is_bundled: bool, is_fit: bool) -> None:
    """Predict published figures with profiles that were fitted without them."""
    everything = read_figures()
    usable = [f for f in everything if not f.excluded]
    if is_fit:
        write_fit([f for f in usable if f.system != HEXAGON or f.id in HEXAGON_FIT])
        return
    if is_terms:
        report_terms(usable)
        return
    if is_bundled:
        report_bundled(usable)
        return
    click.echo(f"{len(everything)} figures, {len(usable)} used\n\nSet aside:")
    for text in dict.fromkeys(f"- {f.id}, {f.system}, {f.model}: {f.excluded}" for f in everything if f.excluded):
        click.echo(text)
    chosen = [split for split in splits(usable) if only is None or re.search(only, split.name)]
    floors = [f for f in everything if f.system == FLOORS]
    shipped = {f.soc: find_device(f"{f.soc}+executorch") for f in floors}
    exceeded = sum(predict(f, shipped[f.soc]).rate > f.published for f in floors)  # type: ignore[arg-type]
    click.echo(f"\nfloors of ExecuTorch's tests, by the shipped profiles: {exceeded} of {len(floors)} exceeded\n")
    report([prediction for split in chosen for prediction in leave_out(split, usable)])


if __name__ == "__main__":
    replay()
