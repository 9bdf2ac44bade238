"""`streamchat bench --sink-map`: does a model have attention sinks, and how many does it need?"""

from pathlib import Path
from typing import TYPE_CHECKING

from streamchat.cli.bench_output import Format, is_drawn, print_data
from streamchat.cli.bench_text import read_text
from streamchat.cli.options import ModelChoice
from streamchat.cli.program import ColorChoice
from streamchat.cli.signals import start_interrupt
from streamchat.config import CacheConfig
from streamchat.ui.console import Messages, make_console
from streamchat.ui.heatmap import HeatRow, print_heat_map
from streamchat.ui.output import Output
from streamchat.ui.tables import markdown_table, print_table

if TYPE_CHECKING:
    from streamchat.bench.sinkmap import Norms, SinkMap

NORMS_HEADER = ("first token", "before", "no sinks", "sinks")
SWEEP_HEADER = ("sinks", "newest", "perplexity")


def map_of_sinks(
    choice: ModelChoice,
    cache: CacheConfig,
    file: Path | None,
    limit: int | None,
    plot: Path | None,
    output: Format,
    messages: Messages,
    color: ColorChoice,
) -> int:
    """Run it; returns the exit code."""
    text = None if file is None else read_text(file)
    if plot is not None:
        from streamchat.bench.plot import check_plot

        check_plot(plot)
    loaded, cache = choice.load(messages, forks=False)

    from streamchat.bench.sample import TEXT
    from streamchat.bench.sinkmap import TEXT_PER_CACHE, cache_size_for, map_sinks, verdict

    with messages.working() as working:
        working("encoding the text")
        tokenizer = loaded.tokenizer
        ids = [*tokenizer.bos_ids(), *tokenizer.encode(TEXT if text is None else text)]
        ids = ids[: limit or TEXT_PER_CACHE * cache.cache_size]
        size = cache_size_for(len(ids), cache.cache_size)
        start_interrupt.check()
        messages.say(
            f"{loaded.source.name} on {loaded.device.type}, {len(ids):,} tokens of "
            f"{file or 'the built-in text'}, caches of {size:,} tokens"
        )
        found = map_sinks(loaded, ids, size, working)
    if not print_data(found.figures(), output):
        _print(found, output, color)
    messages.say(verdict(loaded.source.name, found))
    if plot is not None:
        from streamchat.bench.plot import draw_sinks

        draw_sinks(plot, found)
        messages.say(f"drawn in {plot}")
    return 0


def _print(found: "SinkMap", output: Format, color: ColorChoice) -> None:
    """The map with the norms beside it, and the sweep under it."""
    from streamchat.bench.sinkmap import MAP_SIZE

    shares, norms = found.shares(MAP_SIZE), [_cells(row) for row in found.norms()]
    sweep = [[f"{s.num_sinks}", f"{s.num_newest:,}", f"{s.perplexity:,.2f}"] for s in found.sweep]
    caption = (
        f"Attention to the first {MAP_SIZE} tokens, by head, in percent; and norms of the hidden "
        "states: of the first token, and of later ones before the first leave, after, and after "
        "with these kept as sinks."
    )
    if is_drawn(output):
        console = make_console(color.value, stderr=False)
        rows = [
            HeatRow(str(layer), own, notes)
            for layer, (own, notes) in enumerate(zip(shares, norms, strict=True))
        ]
        print_heat_map(console, caption, ("layer", *NORMS_HEADER), rows)
        print_table(console, SWEEP_HEADER, sweep)
        return
    heads = [f"head {head}" for head in range(len(shares[0]))]
    table = [
        [str(layer), *(f"{share:.0%}" for share in own), *notes]
        for layer, (own, notes) in enumerate(zip(shares, norms, strict=True))
    ]
    whole = markdown_table(("layer", *heads, *NORMS_HEADER), table)
    Output().line("\n\n".join([caption, whole, markdown_table(SWEEP_HEADER, sweep)]))


def _cells(norms: "Norms") -> list[str]:
    values = (norms.of_first, norms.before, norms.without_sinks, norms.with_sinks)
    return [f"{value:,.4g}" if value < 1000 else f"{value:,.0f}" for value in values]
