"""Draw a perplexity run, or a map of the sinks.

The first panel of a run is the paper's figure 3 (Xiao et al. 2023), for any text and model, the
map is its figure 2. matplotlib is an optional extra: nobody else needs it.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from streamchat.bench.perplexity import Segment, mean_perplexity
from streamchat.bench.sinkmap import MAP_SIZE, SinkMap
from streamchat.errors import OutputError, UsageError

SUFFIXES = (".png", ".svg", ".pdf")
LARGEST_RATIO = 20.0
"""Where memory differs more than this between policies, its axis is logarithmic."""


def check_plot(file: Path) -> None:
    """Say before the work, not after it, that a plot cannot be drawn.

    Raises:
        UsageError: If it is no picture's name, or matplotlib is missing.
    """
    if file.suffix not in SUFFIXES:
        raise UsageError(f"--plot must end in {', '.join(SUFFIXES)}, got '{file}'")
    if not file.parent.is_dir():
        raise UsageError(f"--plot: no such folder: {file.parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'streamchat-cli[plot]'")


def draw(file: Path, runs: Sequence[tuple[str, Sequence[Segment]]]) -> None:
    """Draw runs, each a name and its segments: loss, time and memory by stream position.

    Raises:
        OutputError: If the file cannot be written.
    """
    figure = _figure(8, 9)
    loss, latency, memory = figure.subplots(3, sharex=True)
    for name, rows in runs:
        ends = [row.position + row.num_tokens for row in rows]
        losses = [row.nats / max(1, row.num_tokens) for row in rows]
        loss.plot(ends, losses, label=f"{name}: {mean_perplexity(rows):,.2f}")
        times = [1e3 * row.seconds / max(1, row.num_tokens) for row in rows]
        latency.plot(ends, times, label=name)
        memory.plot(ends, [row.cache_megabytes for row in rows], label=name)
    loss.set_ylabel("log perplexity (nats per token)")
    loss.legend(title="perplexity over all", fontsize="small")
    latency.set_ylabel("ms per token")
    latency.set_yscale("log")
    memory.set_ylabel("cache, MB")
    sizes = [row.cache_megabytes for _, rows in runs for row in rows if row.cache_megabytes]
    if sizes and max(sizes) > LARGEST_RATIO * min(sizes):
        memory.set_yscale("log")
    else:
        memory.set_ylim(bottom=0)
    memory.set_xlabel("stream position, tokens")
    for axis in (loss, latency, memory):
        axis.grid(alpha=0.3)
    _save(figure, file)


def draw_sinks(file: Path, found: SinkMap) -> None:
    """Draw a map of the sinks: attention, perplexity by number of sinks, and the norms that move.

    Raises:
        OutputError: If the file cannot be written.
    """
    figure = _figure(11, 8)
    grid = figure.add_gridspec(2, 2)
    attention, sweep = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    norms = figure.add_subplot(grid[1, :])
    shares = attention.imshow(found.shares(MAP_SIZE), vmin=0, vmax=1, cmap="magma", aspect="auto")
    attention.set_title(f"attention to the first {MAP_SIZE} of {found.prompt_length:,} tokens")
    attention.set_xlabel("head")
    attention.set_ylabel("layer")
    figure.colorbar(shares, ax=attention)
    names = [str(row.num_sinks) for row in found.sweep]
    bars = sweep.bar(names, [row.perplexity for row in found.sweep])
    sweep.bar_label(bars, fmt="{:,.1f}")
    sweep.margins(y=0.1)
    sweep.set_title(f"perplexity, caches of {found.cache_size:,} tokens")
    sweep.set_xlabel("sinks")
    layer = max(found.norms(), key=lambda row: abs(row.move)).layer
    for name, by_layer in found.curves.items():
        # The first token's norm is many times the others'.
        norms.plot(range(1, len(by_layer[layer])), by_layer[layer][1:], label=name, lw=0.8)
    norms.axvline(found.cache_size, color="gray", ls="--", label="the first token leaves")
    norms.set_title(f"norm of the hidden states after layer {layer}")
    norms.set_xlabel("stream position, tokens")
    norms.legend(fontsize="small")
    norms.grid(alpha=0.3)
    _save(figure, file)


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, file: Path) -> None:
    try:
        figure.savefig(file, dpi=150)
    except OSError as error:
        raise OutputError(f"cannot write {file}: {error.strerror}") from error
