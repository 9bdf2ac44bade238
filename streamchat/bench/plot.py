"""Draw a perplexity run: loss, time and memory against the position in the stream.

The first panel is the paper's figure 3 (Xiao et al. 2023), for any text and model. matplotlib is
an optional extra: nobody else needs it.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from streamchat.bench.perplexity import Segment, mean_perplexity
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
    """Draw runs, each a name and its segments.

    Raises:
        OutputError: If the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 9), layout="constrained")
    FigureCanvasAgg(figure)
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
    try:
        figure.savefig(file, dpi=150)
    except OSError as error:
        raise OutputError(f"cannot write {file}: {error.strerror}") from error
