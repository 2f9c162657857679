"""`chunkrt simulate`: predict the prefill speed of a model on a device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

import click
from click.core import ParameterSource

from chunkrt.cli.command import Command, GroupedCommand, json_option, model_argument, option, plot_option
from chunkrt.cli.output import print_table
from chunkrt.cli.plan import compiled_options, placement_of, read_model
from chunkrt.cli.plots import draw_simulations
from chunkrt.cli.shared_options import engine_fields, refuse_without, settings_option, verbose_option
from chunkrt.cli.simulated_serving import ServingOptions, simulate_served
from chunkrt.engine.npu_attention import near_by_reach
from chunkrt.engine.options import AttentionOn, EngineOptions, lengths_of
from chunkrt.engine.settings import DEVICE
from chunkrt.engine_directory.manifest import is_engine_directory
from chunkrt.errors import ConfigError
from chunkrt.graph.placement import Placement
from chunkrt.graph.plan import ALONE, Plan, Ranks
from chunkrt.pictures import check_picture
from chunkrt.quant.scheme import DEFAULT_SCHEME, MIXED, SCHEME_NAMES, Scheme, find_scheme
from chunkrt.runtime.executor import DecodeOn
from chunkrt.runtime.policy import ALL, DEFAULT_POLICY, PLUGINS, POLICIES
from chunkrt.runtime.trace.file import check_trace_path, write_trace
from chunkrt.simulate import DEVICES, LINKS, DeviceProfile, LinkProfile, Simulation, find_device, find_link, shapes
from chunkrt.simulate import simulate as simulate_prompt
from chunkrt.simulate.arrivals import ARRIVALS_FORM, LENGTHS_FORM
from chunkrt.simulate.compose import SOFTWARE
from chunkrt.simulate.experiments import with_attention_on_cpu
from chunkrt.simulate.link_profile import FORM
from chunkrt.simulate.measured import MeasuredProfile
from chunkrt.simulate.partition_search import Lengths
from chunkrt.simulate.simulator import chunk_text, graphs_text
from chunkrt.simulate.sustained import Sustained, sustain

DEFAULT_DEVICE_SCHEME = "w8a16"
DEFAULT_PROMPTS = "64,256,1024"
DEFAULT_CHUNKS = ("32", "128", "256")

SIMULATED_SETTINGS = (
    *("policy", "scheme", "threads", "placement", "shadow", "budget", "calibration"),
    *("attention", "npu_window", "npu_graph", "npu_sinks", "chunks_in_flight"),
)
"""Settings of an engine that a simulation uses under their own names."""
SERVER_SETTINGS = ("batcher", "decode_on")
"""Further such settings that the simulation of a server uses."""

Profile = DeviceProfile | MeasuredProfile

LEAST_SHARE = 0.0005
"""Least share of idle time that is printed."""


DEVICE_HELP = (
    f"Device: {', '.join(DEVICES)}, an SoC, an SoC with a software (SM8850+genie; {', '.join(SOFTWARE)}), or a file."
)


def device_option(command: Command) -> Command:
    """Give a command --device, which is required; it arrives as the keyword argument `device_name`."""
    return option("--device", "--soc", "device_name", group="Devices", required=True, help=DEVICE_HELP)(command)


@click.command(
    cls=GroupedCommand,
    first="device_name prompt_lengths chunk_lengths policy scheme attention arrivals ranks plot as_json",
    epilog=f"Built-in shapes: {', '.join(shapes())}.",
)
@model_argument
@option(
    "--device", "--soc", "device_name", group="Devices", help=f"{DEVICE_HELP}  [default: the settings' device or SoC]"
)
@option(
    "-p",
    "--prompt-lengths",
    group="Workload",
    help=f"Prompt lengths in tokens, separated by commas.  [default: {DEFAULT_PROMPTS}]",
)
@option(
    "--chunk",
    "chunk_lengths",
    group="Execution",
    multiple=True,
    metavar="TOKENS[,TOKENS...]",
    help="Tokens per chunk; several lengths, as in 1,8,32, for a graph on the NPU for each, as in `chunkrt run`. "
    "Repeat the option to compare.  [default: 32, 128 and 256, or as profiled]",
)
@option(
    "--policy",
    group="Execution",
    default=DEFAULT_POLICY,
    show_default=True,
    help=f"Policies, separated by commas: {', '.join(POLICIES)}, the name of a plug-in's policy, or all.",
)
@option(
    "--scheme",
    group="Quantisation",
    type=click.Choice(SCHEME_NAMES),
    help="Quantisation of weights and activations.  [default: the engine directory's or the profile's, else w8a16]",
)
@option("--threads", group="Execution", type=int, help="Number of threads, one that was profiled.  [default: the most]")
@engine_fields("placement", "shadow", "budget", "calibration", "attention", "npu_window", "npu_graph", "npu_sinks")
@option(
    "--in-flight",
    "chunks_in_flight",
    group="Execution",
    type=int,
    help="Chunks in flight at once.  [default: as many as an engine uses]",
)
@option(
    "--overlap-conversion",
    "overlaps_conversion",
    group="Execution",
    is_flag=True,
    help="Assume that values are converted while the NPU computes.",
)
@option(
    "--power-mode",
    "power_mode",
    group="Devices",
    metavar="NAME",
    help="Power mode of the NPU, one of the profile's, e.g. balanced.  [default: its full clock]",
)
@option(
    "--energy",
    "shows_energy",
    group="Output",
    is_flag=True,
    help="Print the joules by processor and state as well.",
)
@option(
    "--minutes",
    group="Workload",
    type=float,
    help="Repeat the prompt without a pause for some minutes, and print rates, temperature and throttling.",
)
@option(
    "--start-celsius",
    "start_c",
    group="Workload",
    type=float,
    help="Temperature at the start of --minutes.  [default: the profile's without load]",
)
@option(
    "--ranks",
    group="Ranks",
    type=int,
    default=1,
    show_default=True,
    help="Number of machines that share the model.",
)
@option(
    "--link",
    "link_name",
    group="Ranks",
    help=f"Network between the ranks: {', '.join(LINKS)}, a TOML file, or {FORM}.",
)
@option(
    "--arrivals",
    group="Workload",
    help=f"Simulate a server with arrivals {ARRIVALS_FORM} (after each answer).",
)
@option("--prompt", group="Workload", help=f"Prompt tokens per request: {LENGTHS_FORM}.")
@option("--generate", group="Workload", help="Generated tokens per request, in the same notation.")
@option(
    "--sessions",
    group="Workload",
    type=int,
    help="Requests that the server computes at once; others wait.  [default: 8]",
)
@option("--requests", group="Workload", type=int, help="Number of requests.  [default: 256]")
@option("--seed", group="Workload", type=int, help="Random seed of arrivals and lengths.  [default: 0]")
@option(
    "--batcher",
    group="Execution",
    help="Rule by which rows of several sequences are put into a chunk.  [default: packed]",
)
@option(
    "--decode-on",
    group="Execution",
    type=click.Choice(get_args(DecodeOn)),
    help="Processor for decoding.  [default: auto]",
)
@option(
    "--trace",
    group="Output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a trace of the simulated prompt or server, for Perfetto's viewer and `chunkrt trace`.",
)
@plot_option("Draw the predictions as .png or .svg (needs matplotlib).")
@json_option("Print the predictions as a JSON list.")
@settings_option(*SIMULATED_SETTINGS, *SERVER_SETTINGS, chunk_lengths="chunk_length", device_name=DEVICE)
@verbose_option
def simulate(
    model: str,
    device_name: str | None,
    prompt_lengths: str | None,
    chunk_lengths: tuple[str, ...] | str | int,
    policy: str,
    scheme: str | None,
    threads: int | None,
    trace: Path | None,
    chunks_in_flight: int | None,
    overlaps_conversion: bool,
    power_mode: str | None,
    shows_energy: bool,
    minutes: float | None,
    start_c: float | None,
    ranks: int,
    link_name: str | None,
    plot: Path | None,
    as_json: bool,
    placement: Path | Placement | None,
    shadow: str | None,
    budget: float | None,
    calibration: Path | None,
    attention: AttentionOn,
    npu_window: str | int,
    npu_graph: str,
    npu_sinks: int | None,
    **serving: Any,
) -> None:
    """Simulate the prefill of MODEL on a device. MODEL may also be the name of a built-in shape, listed below.

    With --ranks, the model is split over the CPUs of several machines, of which one is simulated, as all take equal
    time. With --arrivals, a server is simulated that batches sequences into shared chunks. With --attention npu, each
    chunk uses the graphs of the smallest --npu-window that holds the tokens before it, and the CPU computes attention
    of later chunks, unless --npu-sinks lets the window slide.

    MODEL may also be a config.json without weights.
    """
    if attention != "npu":
        refuse_without("--attention npu", "npu_window", "npu_graph", "npu_sinks")
        npu_sinks = None  # a settings file may name it for an engine
    elif serving["arrivals"] is not None or ranks > 1:
        raise ConfigError(
            "attention on the NPU can be simulated for one prompt on one machine only; omit --attention npu"
        )
    if serving["arrivals"] is None:
        source = click.get_current_context().get_parameter_source
        of_settings = [name for name in SERVER_SETTINGS if source(name) is not ParameterSource.COMMANDLINE]
        serving |= dict.fromkeys(of_settings)  # a settings file may be for a server too
    options = ServingOptions(**serving)
    options.check(prompt_lengths, ranks, link_name)
    if plot is not None:
        if options.arrivals is not None:
            raise ConfigError("--plot draws single prompts; with --arrivals, omit it or use --trace")
        check_picture(plot)
    if minutes is None:
        refuse_without("--minutes", "start_c")
    elif options.arrivals is not None or ranks > 1:
        raise ConfigError("--minutes repeats one prompt on one machine; omit --arrivals and --ranks")
    if shows_energy and (options.arrivals is not None or ranks > 1):
        raise ConfigError("--energy needs single prompts on one machine; omit --arrivals and --ranks")
    if device_name is None:
        raise click.UsageError("Missing option '--device' / '--soc'. A settings file may name the device as well.")
    device = _in_mode(find_device(device_name), power_mode)
    link = find_link(link_name) if link_name is not None else None
    one_of = Ranks(0, ranks)
    is_compiled = is_engine_directory(Path(model))
    if scheme is None and not is_compiled:
        of_device = DEFAULT_DEVICE_SCHEME if one_of.are_alone else DEFAULT_SCHEME
        scheme = device.scheme if isinstance(device, MeasuredProfile) else of_device
    if isinstance(chunk_lengths, str | int):  # a settings file has one value
        chunk_lengths = (str(chunk_lengths),)
    if not chunk_lengths and isinstance(device, MeasuredProfile):
        chunk_lengths = (chunk_text(device.chunk_length, device.graph_lengths),)
    policies = [*POLICIES, *PLUGINS.load_all()] if policy == ALL else policy.split(",")
    prompts = _lengths("-p", DEFAULT_PROMPTS if prompt_lengths is None else prompt_lengths)
    chunks = [graph_lengths("--chunk", each) for each in chunk_lengths or DEFAULT_CHUNKS]
    if trace is not None:
        of_prompt = "one prompt length, " if options.arrivals is None else ""
        if (len(prompts) if of_prompt else 1) * len(chunks) * len(policies) > 1:
            raise ConfigError(f"--trace needs {of_prompt}one chunk length and one policy, e.g. --chunk 32")
        check_trace_path(trace)
    if scheme != MIXED and shadow != "auto":
        refuse_without("--scheme mixed or --shadow auto", "calibration")
        calibration = None  # a settings file may name one for an engine
    # The plan is for the device, even if this machine has no NPU.
    is_for_npu = is_compiled or find_scheme(scheme or DEFAULT_DEVICE_SCHEME).is_static
    if attention == "npu" and not is_for_npu:
        raise ConfigError(f"the NPU does not run the scheme {scheme}; choose a static one, or omit --attention npu")
    engine = compiled_options(
        model,
        EngineOptions(
            npu="qnn" if is_for_npu and one_of.are_alone else "auto",
            scheme=scheme,
            placement=placement,
            shadow=shadow,
            budget=budget,
            calibration=calibration,
            attention=attention,
            npu_window=npu_window,
            npu_graph=npu_graph,
            npu_sinks=npu_sinks,
        ),
    )
    plan, settled = _plan(model, engine, one_of)
    can_use_npu = is_for_npu and (isinstance(device, MeasuredProfile) or device.uses_npu)
    runs_on_npu = can_use_npu and any(subgraph.device == "npu" for subgraph in plan.subgraphs)
    for flag, is_given in (("--overlap-conversion", overlaps_conversion), ("--power-mode", power_mode is not None)):
        if is_given and not runs_on_npu:
            raise ConfigError(f"{flag} has no effect without work on an NPU; omit it")
    if not runs_on_npu and (several := next((each for each in chunks if len(each) > 1), None)):
        raise ConfigError(
            f"--chunk {graphs_text(several)} has no effect with several lengths without work on an NPU; give one "
            "length, or repeat --chunk to compare lengths"
        )
    if options.arrivals is not None:
        if overlaps_conversion:
            raise ConfigError("--overlap-conversion has no effect with --arrivals; omit it")
        simulate_served(
            model,
            plan,
            device,
            options,
            chunks=chunks,
            policies=policies,
            scheme=settled,
            chunks_in_flight=chunks_in_flight,
            threads=threads,
            trace=trace,
            as_json=as_json,
        )
        if not as_json:
            click.echo(accuracy_of(device))
        return

    points = [*product(prompts, chunks, policies)]

    @cache
    def near() -> dict[int, Plan]:
        return _near(model, plan, engine) if ranks == 1 and is_for_npu else {}

    def simulate_one(
        plan: Plan, scheme: Scheme, link: LinkProfile | None, point: tuple[int, Lengths, str], device: Profile
    ) -> Simulation:
        prompt, lengths, name = point
        return simulate_prompt(
            plan,
            device,
            prompt_length=prompt,
            chunk_length=lengths[-1],
            graph_lengths=lengths,
            policy=name,
            scheme=scheme,
            near=near() if lengths[-1] <= plan.context_length else {},  # the simulator refuses longer chunks
            chunks_in_flight=chunks_in_flight,
            threads=threads,
            ranks=1 if link is None else ranks,
            link=link,
            overlaps_conversion=overlaps_conversion,
        )

    rows = [simulate_one(plan, settled, link, point, device) for point in points]
    lasting: list[Sustained] = []
    if minutes is not None:
        if isinstance(device, MeasuredProfile):
            raise ConfigError(f"{device.name} has no power and thermal figures, which --minutes needs")
        for point in points:
            lasting.append(sustain(partial(simulate_one, plan, settled, None, point), device, minutes, start_c))
    speed_ups: list[float | None] = [None] * len(rows)
    if link is not None and not is_compiled:
        whole, scheme_of_one = _plan(model, engine, ALONE)
        alone = [simulate_one(whole.on_cpu(), scheme_of_one, None, point, device) for point in points]
        speed_ups = [row.tokens_per_s / single.tokens_per_s for row, single in zip(rows, alone, strict=True)]
    if plot is not None:
        draw_simulations(model, rows, plot)
    if trace is not None:
        write_trace(trace, rows[0].records, f"chunkrt simulate {model}")
    if as_json:
        results = [{"model": model, "origin": "predicted"} | row.to_dict() for row in rows]
        if link is not None:
            results = [result | {"speed_up": ratio} for result, ratio in zip(results, speed_ups, strict=True)]
        if lasting:
            results = [result | {"sustained": one.to_dict()} for result, one in zip(results, lasting, strict=True)]
        click.echo(json.dumps(results, indent=1))
    elif link is not None:
        _print_ranks(model, rows, link, speed_ups)
    else:
        _print(model, rows)
        if shows_energy:
            _print_energy(rows)
        if lasting:
            _print_sustained(rows, lasting)
    if not as_json:
        click.echo(accuracy_of(device))


def _in_mode(device: Profile, name: str | None) -> Profile:
    if name is None:
        return device
    if isinstance(device, MeasuredProfile):
        raise ConfigError(f"{device.name} was measured in one power mode; omit --power-mode")
    return device.in_mode(name)


def accuracy_of(device: DeviceProfile | MeasuredProfile) -> str:
    """Return a line about the origin of predictions, and about their comparison with measurements."""
    return f"predicted from the profile of {device.name}: {device.accuracy}"


def _near(model: str, plan: Plan, options: EngineOptions) -> dict[int, Plan]:
    """Map the last position at which a chunk may begin to each plan with attention on the NPU."""
    context_length = options.context_length or plan.context_length
    return near_by_reach(plan, placement_of(model, options), options, context_length)


def graph_lengths(option: str, text: str) -> Lengths:
    """Return the lengths of an option in the form of `chunk_length`, shortest first."""
    if lengths := lengths_of(text):
        return lengths
    raise ConfigError(
        f"{option} is {text!r}, expected numbers of tokens, at least 1, with commas between, as in 1,8,32"
    )


def _lengths(option: str, text: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise ConfigError(f"{option} is {text!r}, expected numbers of at least 1, separated by commas, e.g. 64,256")
    return lengths


def _plan(model: str, options: EngineOptions, ranks: Ranks) -> tuple[Plan, Scheme]:
    """Return the plan of a shape or a model, and its scheme."""
    try:
        plan, scheme, _ = read_model(model, options, ranks)
    except ConfigError as error:
        if Path(model).exists() or model in shapes() or model not in str(error):
            raise
        raise ConfigError(f"{error}; built-in shapes are {', '.join(shapes())}") from error
    if ranks.are_alone:
        plan = with_attention_on_cpu(plan, placement_of(model, options), scheme)
    return plan, scheme


def _print(model: str, rows: Sequence[Simulation]) -> None:
    click.echo(f"{model} on {rows[0].device}, scheme {rows[0].scheme}")
    has_ends = any(row.interval is not None for row in rows)
    has_graphs = any(row.graph_lengths for row in rows)
    ends_head = ["80 %"] * has_ends
    head = (
        "prompt",
        "chunk",
        "policy",
        "ttft ms",
        "tokens/s",
        *ends_head,
        "npu busy",
        "cpu busy",
        "overlap",
        *(["contexts", "padding"] if has_graphs else []),
        "MB",
        "joules",
    )
    table: list[Sequence[str]] = [(*head, "most idle for")]
    for row in rows:
        ends = [f"{low:.0f}-{high:.0f}" for low, high in _ends(row)]
        figures = (f"{row.time_to_first_token_ms:.1f}", f"{row.tokens_per_s:.1f}", *ends)
        shares = (f"{share:.1%}" for share in (row.npu_busy, row.cpu_busy, row.overlap))
        joules = "" if row.energy_joules is None else f"{row.energy_joules:.2f}"
        memory = f"{row.peak_memory_bytes / 1e6:.0f}"
        names = (str(row.prompt_length), row.chunks_text, row.policy)
        graphs = (str(row.contexts), "-" if row.padding is None else f"{row.padding:.1%}") if has_graphs else ()
        table.append((*names, *figures, *shares, *graphs, memory, joules, _most_idle(row)))
    print_table(table, right=[name for name in head if name != "policy"], between=" ")


def _ends(row: Simulation) -> list[tuple[float, float]]:
    return [] if row.interval is None else [row.interval.tokens_per_s]


def _print_energy(rows: Sequence[Simulation]) -> None:
    """Print the joules by processor and state, and the ends of their sum."""
    states = [*rows[0].joules]
    if not states:
        click.echo("the profile has no power figures")
        return
    head = ("prompt", "chunk", "policy", *(f"{state} J" for state in states), "sum J", "80 %", "W")
    table: list[Sequence[str]] = [head]
    for row in rows:
        total = sum(row.joules.values())
        ends = row.interval.energy_joules if row.interval is not None else None
        names = (str(row.prompt_length), row.chunks_text, row.policy)
        between = "" if ends is None else f"{ends[0]:.2f}-{ends[1]:.2f}"
        watts = f"{1000 * total / row.time_to_first_token_ms:.2f}"
        table.append((*names, *(f"{row.joules[state]:.2f}" for state in states), f"{total:.2f}", between, watts))
    print_table(table, right=[name for name in head if name != "policy"], between=" ")


def _print_sustained(rows: Sequence[Simulation], lasting: Sequence[Sustained]) -> None:
    head = (
        "prompt",
        "chunk",
        "policy",
        "minutes",
        "prompts",
        "tokens/s first",
        "last",
        "mean",
        "W",
        "J",
        "C first",
        "C last",
    )
    table: list[Sequence[str]] = [(*head, "throttled")]
    for row, one in zip(rows, lasting, strict=True):
        names = (str(row.prompt_length), row.chunks_text, row.policy)
        rates = (f"{one.first_tokens_per_s:.1f}", f"{one.last_tokens_per_s:.1f}", f"{one.tokens_per_s:.1f}")
        figures = (f"{one.watts:.2f}", f"{one.energy_joules:.0f}", f"{one.first_c:.1f}", f"{one.last_c:.1f}")
        throttled = "never" if one.throttled_after_s is None else f"after {one.throttled_after_s:.0f} s"
        table.append((*names, f"{one.seconds / 60:.1f}", str(one.num_prompts), *rates, *figures, throttled))
    print_table(table, right=[name for name in head if name != "policy"], between=" ")


def _print_ranks(model: str, rows: Sequence[Simulation], link: LinkProfile, speed_ups: Sequence[float | None]) -> None:
    first = rows[0].link
    assert first is not None
    click.echo(f"{model} on {first.ranks} x {rows[0].device}, CPU alone, scheme {rows[0].scheme}, joined by {link}")
    line = "{:>6} {:>5}  {:13} {:>9} {:>9} {:>8} {:>8} {:>8} {:>8} {:>8} {:>9} {:>7}"
    head = ("prompt", "chunk", "policy", "ttft ms", "tokens/s", "speed-up", "cpu busy")
    click.echo(line.format(*head, "link ms", "busy", "hidden", "MB sent", "MB"))
    for row, speed_up in zip(rows, speed_ups, strict=True):
        assert row.link is not None
        names = (row.prompt_length, row.chunk_length, row.policy)
        figures = (
            f"{row.time_to_first_token_ms:.1f}",
            f"{row.tokens_per_s:.1f}",
            f"{speed_up:.2f}x" if speed_up else "-",
        )
        times = (f"{row.cpu_busy:.1%}", f"{row.link.busy_ms:.1f}", f"{row.link.busy:.1%}", f"{row.link.hidden:.1%}")
        memory = (f"{row.link.sent_bytes / 1e6:.1f}", f"{row.peak_memory_bytes / 1e6:.0f}")
        click.echo(line.format(*names, *figures, *times, *memory))
    click.echo(
        "One rank is simulated; all have equal shares. Speed-up is relative to one rank; sent and MB are per rank."
    )


def _most_idle(row: Simulation) -> str:
    """Return the largest cause of idle time of every processor."""
    parts = []
    for name, shares in row.processors.items():
        if idle := {cause: share for cause, share in shares.idle.items() if share >= LEAST_SHARE}:
            cause = max(idle, key=idle.__getitem__)
            parts.append(f"{name}: {cause} {idle[cause]:.1%}")
    return ", ".join(parts)
