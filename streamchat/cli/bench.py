"""`streamchat bench`: speed and memory of an endless stream, on this machine."""

import dataclasses
import sys
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from streamchat.cli.options import (
    SINKS_DEFAULT,
    WINDOW_DEFAULT,
    ColorChoice,
    ColorOption,
    DebugOption,
    DeviceMapOption,
    DeviceOption,
    DtypeOption,
    ModelChoice,
    ModelOption,
    NoSelfCheckOption,
    QuantizeOption,
    QuietOption,
    RemoteCodeOption,
    SinksOption,
    WindowOption,
    parse_cache,
    session_of,
)
from streamchat.errors import UsageError

if TYPE_CHECKING:
    from streamchat.bench.measure import BenchRow

EPILOG = """
Examples:

    streamchat bench

    streamchat bench --depth 1,64 --window 252

    streamchat bench --batch 8 -o json > bench.jsonl
"""


HEADER = (
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


class Format(str, Enum):
    """Values of --output."""

    auto = "auto"
    table = "table"
    md = "md"
    csv = "csv"
    json = "json"


def bench(
    ctx: typer.Context,
    depth: Annotated[
        str,
        typer.Option(help="Where in the stream to measure: multiples of the cache size, commas."),
    ] = "1,4,16",
    batch: Annotated[int, typer.Option(help="Rows that are fed in step.")] = 1,
    tokens: Annotated[int, typer.Option(help="Tokens of one decode measurement.")] = 64,
    prefill: Annotated[int, typer.Option(help="Tokens of one prefill measurement.")] = 512,
    repeat: Annotated[int, typer.Option("--repeat", "-r", help="Measurements at each depth.")] = 3,
    seed: Annotated[
        int, typer.Option(envvar="STREAMCHAT_SEED", help="Seed of the random tokens.")
    ] = 0,
    output: Annotated[
        Format,
        typer.Option("--output", "-o", help="auto: a table on a terminal, else Markdown."),
    ] = Format.auto,
    model: ModelOption = None,
    sinks: SinksOption = SINKS_DEFAULT,
    window: WindowOption = WINDOW_DEFAULT,
    device: DeviceOption = "auto",
    device_map: DeviceMapOption = "none",
    dtype: DtypeOption = "auto",
    quantize: QuantizeOption = "auto",
    trust_remote_code: RemoteCodeOption = False,
    no_self_check: NoSelfCheckOption = False,
    debug: DebugOption = False,
    quiet: QuietOption = False,
    color: ColorOption = ColorChoice.auto,
) -> int:
    """Measure prefill, decode and memory with the cache full, deeper and deeper in a stream.

    Warm-up is left out, prefill and decode are measured apart, on random tokens. The roofline is
    the time that a step needs to read weights and cache from memory, over the time that it took.
    """
    messages = session_of(ctx).also(debug=debug, quiet=quiet, color=color)
    cache = parse_cache(sinks, window)
    depths = _parse_depths(depth)
    choice = ModelChoice(
        model, cache, device, dtype, quantize, trust_remote_code, no_self_check, device_map
    )
    loaded, cache = choice.load(messages, batch_size=max(1, batch))

    from streamchat.bench.measure import BenchConfig, measure, verdict
    from streamchat.bench.roofline import read_bandwidth

    config = BenchConfig(
        cache=cache,
        depths=depths,
        batch_size=batch,
        prefill_tokens=prefill,
        decode_tokens=tokens,
        repeats=repeat,
        seed=seed,
    )
    messages.say(
        f"{loaded.source.name} on {loaded.device.type}, "
        f"{str(loaded.model.dtype).removeprefix('torch.')}, cache {cache.describe()}"
    )
    with messages.working() as working:
        working("measuring how fast memory is read")
        bandwidth = read_bandwidth(loaded.device)
        rows = list(measure(loaded, config, working, bandwidth))
    _print(rows, output, color)
    messages.say(
        f"roofline: memory reads {bandwidth / 1e9:.1f} GB/s (best of several sums over a large "
        f"array), and a step must read {rows[-1].step_megabytes:,.1f} MB, every weight once and "
        "the cache"
    )
    messages.say(verdict(rows))
    return 0


def _parse_depths(text: str) -> list[int]:
    try:
        depths = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise UsageError(f"--depth must be whole numbers with commas, got '{text}'") from error
    if depths[0] < 1:
        raise UsageError(f"--depth must be at least 1, got {depths[0]}")
    return depths


def _print(rows: "list[BenchRow]", output: Format, color: ColorChoice) -> None:
    from streamchat.ui.console import is_tty, make_console
    from streamchat.ui.output import Output
    from streamchat.ui.tables import csv_text, json_lines, markdown_table, print_table

    records = [
        {
            key: round(value, 3) if isinstance(value, float) else value
            for key, value in dataclasses.asdict(row).items()
        }
        for row in rows
    ]
    if output is Format.json:
        Output().line(json_lines(records))
    elif output is Format.csv:
        Output().line(csv_text(records))
    elif output is Format.table or (output is Format.auto and is_tty(sys.stdout)):
        print_table(make_console(color.value, stderr=False), HEADER, [_cells(row) for row in rows])
    else:
        Output().line(markdown_table(HEADER, [_cells(row) for row in rows]))


def _cells(row: "BenchRow") -> list[str]:
    return [
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
