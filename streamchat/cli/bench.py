"""`streamchat bench`: speed, memory and perplexity of an endless stream, on this machine."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from streamchat.cli.bench_eval import DISTANCES, measure_memory
from streamchat.cli.bench_output import Format, FormatOption, print_records
from streamchat.cli.bench_sinks import map_of_sinks
from streamchat.cli.bench_text import measure_perplexity
from streamchat.cli.expand import expand
from streamchat.cli.options import LoadOptions, ModelChoice, SizeOptions
from streamchat.cli.program import ProgramOptions, program_of
from streamchat.cli.settings import Checked
from streamchat.config import POLICIES, CacheConfig, Policy
from streamchat.errors import UsageError
from streamchat.ui.console import Messages

if TYPE_CHECKING:
    from streamchat.bench.measure import BenchRow
    from streamchat.model.load import LoadedModel

EPILOG = """
Examples:

    streamchat bench

    streamchat bench --depth 1,64 --window 252

    streamchat bench --batch 8 -o json > bench.jsonl

    streamchat bench --ppl book.txt --policy sink,window,dense --limit 16384 --plot book.svg

    streamchat bench --streameval --policy sink,window,dense --distances 256,0.9x,2x

    streamchat bench --sink-map --plot sinks.png
"""

QUESTIONS = 20

BELONGS_TO = {
    "--limit": ("--ppl", "--sink-map"),
    "--keep": ("--ppl",),
    "--plot": ("--ppl", "--sink-map"),
    "FILE": ("--sink-map",),
    "--distances": ("--streameval",),
    "--questions": ("--streameval",),
    "--no-template": ("--streameval",),
}
"""What is measured with an option; the others have no use for it."""

HEADER = (
    "policy",
    "depth",
    "batch",
    "prefill t/s",
    "decode t/s",
    "ttft ms",
    "step ms p50/p99/max",
    "peak MB",
    "cache MB",
    "roofline",
)


@expand()
def bench(
    ctx: typer.Context,
    depth: Annotated[
        str,
        typer.Option(
            envvar="STREAMCHAT_DEPTH",
            metavar="N|N,N",
            help="Where in the stream to measure: multiples of the cache size, commas.",
        ),
        Checked(lambda text: _parse_depths(text)),
    ] = "1,4,16",
    batch: Annotated[
        int,
        typer.Option(envvar="STREAMCHAT_BATCH", metavar="N", help="Rows that are fed in step."),
    ] = 1,
    tokens: Annotated[
        int,
        typer.Option(
            envvar="STREAMCHAT_TOKENS", metavar="N", help="Tokens of one decode measurement."
        ),
    ] = 64,
    prefill: Annotated[
        int,
        typer.Option(
            envvar="STREAMCHAT_PREFILL", metavar="N", help="Tokens of one prefill measurement."
        ),
    ] = 512,
    repeat: Annotated[
        int,
        typer.Option(
            "--repeat",
            "-r",
            envvar="STREAMCHAT_REPEAT",
            metavar="N",
            help="Measurements at each depth.",
        ),
    ] = 3,
    seed: Annotated[
        int,
        typer.Option(envvar="STREAMCHAT_SEED", metavar="N", help="Seed of the random tokens."),
    ] = 0,
    policy: Annotated[
        str,
        typer.Option(
            envvar="STREAMCHAT_POLICY",
            metavar="POLICIES",
            help=f"What to compare, with commas: {', '.join(POLICIES)}; all have the same size.",
        ),
        Checked(lambda text: _parse_policies(text)),
    ] = "sink",
    ppl: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Measure the perplexity of this text, streamed, instead."
        ),
    ] = None,
    streameval: Annotated[
        bool,
        typer.Option(
            "--streameval",
            help="Ask about facts in a stream, instead: what is remembered from how far back?",
        ),
    ] = False,
    sink_map: Annotated[
        bool,
        typer.Option(
            "--sink-map",
            help="Look for attention sinks, instead, on FILE or a built-in text: does the model "
            "have any, and how many does it need?",
        ),
    ] = False,
    file: Annotated[Path | None, typer.Argument(help="The text of --sink-map.")] = None,
    distances: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="With --streameval, how far back facts lie when they are asked for: tokens, or "
            "caches with an x; commas.",
        ),
    ] = DISTANCES,
    questions: Annotated[
        int, typer.Option(min=1, metavar="N", help="With --streameval, questions at each distance.")
    ] = QUESTIONS,
    no_template: Annotated[
        bool,
        typer.Option(
            "--no-template",
            help="With --streameval, ask without the chat template: for base models.",
        ),
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            min=2, metavar="N", help="Tokens of the text at most, with --ppl or --sink-map."
        ),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Keep the run of --ppl here, and go on with it if it was interrupted.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw what --ppl or --sink-map found: a .png, .svg or .pdf file."
        ),
    ] = None,
    output: FormatOption = Format.auto,
    *,
    model: LoadOptions,
    sizes: SizeOptions,
    program: ProgramOptions,
) -> int:
    """Measure speed and memory, deeper and deeper in a stream.

    The cache is full, warm-up is left out, prefill and decode are measured apart, on random tokens.
    The roofline is the time that a step needs to read weights and cache from memory, over the time
    that it took.
    With --ppl, a text is streamed through each policy, and how well its tokens are predicted is
    reported: over the whole text and by segment. With --streameval, each policy is asked about
    facts that lie farther and farther back in a stream. With --sink-map, the model is searched for
    attention sinks.
    """
    state = program_of(ctx)
    messages = state.start(ctx, program)
    cache, policies = sizes.config(), _parse_policies(policy)
    depths = _parse_depths(depth)
    _check_goal(
        {"--ppl": ppl is not None, "--streameval": streameval, "--sink-map": sink_map},
        {
            "--limit": limit is not None,
            "--keep": keep is not None,
            "--plot": plot is not None,
            "FILE": file is not None,
            "--distances": distances != DISTANCES,
            "--questions": questions != QUESTIONS,
            "--no-template": no_template,
        },
    )
    if sink_map and policies != ["sink"]:
        raise UsageError("--sink-map compares caches with and without sinks: leave out --policy")
    # What learned positions allow decides whether the model is refused.
    first = dataclasses.replace(cache, policy=policies[0])
    choice = ModelChoice(model, first)
    color = state.color
    if ppl is not None:
        return measure_perplexity(
            choice, cache, policies, ppl, limit, keep, plot, output, messages, color
        )
    if streameval:
        return measure_memory(
            choice,
            cache,
            policies,
            distances,
            questions,
            seed,
            no_template,
            output,
            messages,
            color,
        )
    if sink_map:
        return map_of_sinks(choice, first, file, limit, plot, output, messages, color)
    loaded, chosen = choice.load(messages, batch_size=max(1, batch))
    budget = chosen if policies[0] != "dense" else cache

    from streamchat.bench.measure import BenchConfig, measure, verdict
    from streamchat.bench.roofline import read_bandwidth
    from streamchat.model.families import trained_length

    messages.say(_header(loaded, budget))
    limit_of_dense = trained_length(loaded.model.config)
    with messages.working() as working:
        working("measuring how fast memory is read")
        bandwidth = read_bandwidth(loaded.device)
        rows: list[list[BenchRow]] = []
        for name in policies:
            config = dataclasses.replace(budget, policy=name)
            if name == "dense":
                config = dataclasses.replace(
                    config, window_size=limit_of_dense or max(depths) * 2 * budget.cache_size
                )
            wanted = BenchConfig(
                cache=config,
                budget=budget.cache_size,
                depths=depths,
                batch_size=batch,
                prefill_tokens=prefill,
                decode_tokens=tokens,
                repeats=repeat,
                seed=seed,
            )
            rows.append(list(measure(loaded, wanted, working, bandwidth)))
    measured = [row for own in rows for row in own]
    skipped = 0 if len(policies) > 1 else 1  # a column that says the same in each row is left out
    cells = [_cells(row)[skipped:] for row in measured]
    print_records(measured, HEADER[skipped:], cells, output, color)
    for name, own in zip(policies, rows, strict=True):
        whose = "" if skipped else f"{name}: "
        _say_what_it_is(whose, own, depths, bandwidth, messages)
        if own:
            messages.say(f"{whose}{verdict(own)}")
    return 0


def _header(loaded: "LoadedModel", cache: CacheConfig) -> str:
    return (
        f"{loaded.source.name} on {loaded.device.type}, "
        f"{str(loaded.model.dtype).removeprefix('torch.')}, cache {cache.describe()}"
    )


def _say_what_it_is(
    whose: str, rows: "list[BenchRow]", depths: list[int], bandwidth: float, messages: Messages
) -> None:
    if len(rows) < len(depths):
        messages.say(
            f"{whose}full before depth {depths[len(rows)]}x; it keeps every token, and this is "
            "as long as the model was trained for"
        )
    if rows and rows[-1].step_megabytes:
        messages.say(
            f"{whose}memory reads {bandwidth / 1e9:.1f} GB/s (best of several sums over a large "
            f"array), and a step must read {rows[-1].step_megabytes:,.1f} MB, every weight once "
            "and the cache"
        )


def _check_goal(goals: dict[str, bool], given: dict[str, bool]) -> None:
    """Refuse two goals at once, and options of one that was not chosen.

    Raises:
        UsageError: With their names.
    """
    chosen = [name for name, is_chosen in goals.items() if is_chosen]
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(chosen)} exclude each other: choose one")
    for option, is_given in given.items():
        if is_given and not set(chosen) & set(BELONGS_TO[option]):
            owners = " or ".join(BELONGS_TO[option])
            raise UsageError(f"{option} belongs to {owners}, which is not given")


def _parse_depths(text: str) -> list[int]:
    try:
        depths = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise UsageError(f"--depth must be whole numbers with commas, got '{text}'") from error
    if depths[0] < 1:
        raise UsageError(f"--depth must be at least 1, got {depths[0]}")
    return depths


def _parse_policies(text: str) -> list[Policy]:
    names = [part.strip() for part in text.split(",")]
    known = [name for name in POLICIES if name in names]
    if len(known) != len(set(names)):
        raise UsageError(
            f"--policy must be some of {', '.join(POLICIES)}, with commas, got '{text}'"
        )
    return sorted(known, key=names.index)


def _cells(row: "BenchRow") -> list[str]:
    return [
        row.policy,
        f"{row.depth}x",
        f"{row.batch_size}",
        f"{row.prefill_rate:,.0f} ± {row.prefill_rate_sd:,.0f}",
        f"{row.decode_rate:,.1f} ± {row.decode_rate_sd:,.1f}",
        f"{row.first_token_ms:,.0f}",
        f"{row.step_ms_p50:.1f}/{row.step_ms_p99:.1f}/{row.step_ms_max:.1f}",
        f"{row.peak_megabytes:,.0f}",
        f"{row.cache_megabytes:,.1f}",
        "" if row.roofline_share is None else f"{row.roofline_share:.0%}",
    ]
