"""`streamchat bench --ppl FILE`: a text, streamed through each policy."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from streamchat.cli.bench_output import Format, print_records
from streamchat.cli.options import ModelChoice
from streamchat.cli.program import ColorChoice
from streamchat.cli.signals import start_interrupt
from streamchat.config import CacheConfig, Policy
from streamchat.errors import InputError, UsageError
from streamchat.ui.console import Messages

if TYPE_CHECKING:
    from streamchat.bench.perplexity import Segment, Summary

HEADER = (
    "policy",
    "tokens",
    "perplexity",
    "on common tokens",
    "last segment",
    "tokens/s",
    "cache MB",
    "work/token",
)


def measure_perplexity(
    choice: ModelChoice,
    cache: CacheConfig,
    policies: Sequence[Policy],
    file: Path,
    limit: int | None,
    keep: Path | None,
    plot: Path | None,
    output: Format,
    messages: Messages,
    color: ColorChoice,
) -> int:
    """Run it; returns the exit code."""
    text = read_text(file)
    loaded, chosen = choice.load(messages, forks=False)
    budget = chosen if policies[0] != "dense" else cache

    from streamchat.bench.perplexity import SEGMENT, stream_text, summarize, with_policies
    from streamchat.model.families import trained_length

    if plot is not None:
        from streamchat.bench.plot import check_plot

        check_plot(plot)
    with messages.working() as working:
        working("encoding the text")
        ids = [*loaded.tokenizer.bos_ids(), *loaded.tokenizer.encode(text)][:limit]
        if len(ids) < 2:
            raise UsageError(f"{file} has {len(ids)} tokens; perplexity needs at least 2")
        start_interrupt.check()
        dense_limit = min(len(ids), trained_length(loaded.model.config) or len(ids))
        configs = with_policies(budget, policies, dense_limit)
        messages.say(
            f"{loaded.source.name} on {loaded.device.type}, {len(ids):,} tokens of {file}, "
            f"caches of {budget.cache_size:,} tokens"
        )
        runs: list[list[Segment]] = []
        for config in configs:

            def tell(row: "Segment", left: float, policy: str = config.policy) -> None:
                working(
                    f"{policy}: {row.position + SEGMENT:,} of {len(ids):,} tokens, perplexity "
                    f"{row.perplexity:.2f}, {_duration(left)} left"
                )

            runs.append(list(stream_text(loaded, config, ids, tell, folder=keep)))
    common = min(rows[-1].position + rows[-1].num_tokens for rows in runs)
    summaries = [
        summarize(config, rows, common) for config, rows in zip(configs, runs, strict=True)
    ]
    print_records(summaries, HEADER, [_cells(summary) for summary in summaries], output, color)
    for summary in summaries:
        if summary.num_tokens + 1 < len(ids):
            messages.say(f"{summary.policy}: ended after {summary.num_tokens + 1:,} tokens, full")
    if plot is not None:
        from streamchat.bench.plot import draw

        draw(plot, [(c.describe(), rows) for c, rows in zip(configs, runs, strict=True)])
        messages.say(f"drawn in {plot}")
    return 0


def read_text(file: Path) -> str:
    """A whole file, as UTF-8; bytes that are none become U+FFFD.

    Raises:
        UsageError: If there is no such file.
        InputError: If it cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError as error:
        raise UsageError(f"no such file: {file}") from error
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error


def _cells(summary: "Summary") -> list[str]:
    return [
        summary.policy,
        f"{summary.num_tokens:,}",
        f"{summary.perplexity:,.3f}",
        f"{summary.perplexity_of_common:,.3f}",
        f"{summary.perplexity_at_end:,.3f}",
        f"{summary.tokens_per_second:,.1f}",
        f"{summary.cache_megabytes:,.1f}",
        f"{summary.work_per_token:,.0f}",
    ]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
