"""The status of a stream on standard error: one redrawn line, or plain lines at intervals."""

import time
from collections.abc import Callable, Sequence

from rich.text import Text

from streamchat.events import Progress, StreamStats
from streamchat.ui.bottom import ERASE_BELOW
from streamchat.ui.cells import cells
from streamchat.ui.console import PLAIN_SECONDS, Messages, can_animate, visible
from streamchat.ui.theme import style

REDRAW_SECONDS = 0.1
BAR_CELLS = 20


class StatusLine:
    """Occupancy, evictions and speed.

    Args:
        messages: Where to write; nothing is written when they are quiet.
        draft: Gives what the user is typing; while there is something, it takes the line.
    """

    def __init__(self, messages: Messages, draft: Callable[[], str] = str) -> None:
        self._messages = messages
        self._draft = draft
        self._redraws = can_animate()
        self._drawn = False
        self._next = time.monotonic() + (0 if self._redraws else PLAIN_SECONDS)

    def update(self, progress: Progress, *, beside_output: bool) -> None:
        """Show where the stream stands, if it is time to.

        Args:
            progress: How far the pipe has come.
            beside_output: Whether data goes to the same terminal, so that each line of it
                cleared the status line away.
        """
        now = time.monotonic()
        was_cleared = self._redraws and beside_output and not self._drawn
        if self._messages.quiet or (now < self._next and not was_cleared):
            return
        self._next = now + (REDRAW_SECONDS if self._redraws else PLAIN_SECONDS)
        if self._redraws:
            self._draw(progress)
        else:
            self._messages.say(plain_status(progress))

    def clear(self) -> None:
        """Take the line away: before data is written to the same terminal, and at the end."""
        if self._drawn:
            self._messages.console.file.write(ERASE_BELOW)
            self._messages.console.file.flush()
            self._drawn = False

    def _draw(self, progress: Progress) -> None:
        console = self._messages.console
        self.clear()
        # One cell less than the width: a terminal may wrap at the last one.
        width = max(1, console.width - 1)
        extras = [f"{progress.tokens_per_second:,.0f} tok/s", f"lines {progress.num_lines:,}"]
        if progress.lag_seconds is not None:
            extras.insert(1, f"lag {progress.lag_seconds:,.1f} s")
        if progress.num_unnoted is not None:
            extras.insert(0, f"unnoted {progress.num_unnoted:,}")
        text = status_text(progress.stats, [*extras, "^C stop"], width)
        if draft := self._draft():
            text = Text(newest(f"? {visible(draft)}▌", width), no_wrap=True)
        # The cursor stays at its beginning: a terminal that becomes narrower wraps it behind that.
        console.print(text, end="\r", no_wrap=True, overflow="crop", crop=True, width=width)
        console.file.flush()
        self._drawn = True


def status_text(stats: StreamStats, extras: Sequence[str], width: int) -> Text:
    """The status line, as much of it as fits in `width` cells, most important first.

    Args:
        stats: Where the stream stands.
        extras: What else there is to say; the first comes before the pinned tokens.
        width: Cells.
    """
    full = stats.num_held >= stats.cache_size
    text = Text(no_wrap=True)
    if width >= 60:
        filled = BAR_CELLS * stats.num_held // stats.cache_size
        text.append("█" * filled, style=style("full" if full else "window"))
        text.append("░" * (BAR_CELLS - filled), style=style("free"))
        text.append(" ")
    parts = [
        f"{stats.num_held:,}/{stats.cache_size:,}",
        f"evicted {stats.num_evicted:,}",
        *extras[:1],
        f"pinned {stats.num_pinned:,}",
        *extras[1:],
    ]
    for index, part in enumerate(parts):
        piece = (" │ " if index else "") + part
        if len(text) + len(piece) > width:
            break
        text.append(piece)
    return text


def newest(text: str, width: int) -> str:
    """As much of the end of a text as fits in `width` cells."""
    while cells(text) > width:
        text = text[1:]
    return text


def plain_status(progress: Progress) -> str:
    """The status as plain words, for logs."""
    stats = progress.stats
    unnoted = "" if progress.num_unnoted is None else f"unnoted={progress.num_unnoted:,} "
    lag = "" if progress.lag_seconds is None else f"lag={progress.lag_seconds:,.1f}s "
    return (
        f"lines={progress.num_lines:,} in={stats.num_tokens:,}tok {lag}{unnoted}"
        f"cache={stats.num_held:,}/{stats.cache_size:,} pinned={stats.num_pinned:,} "
        f"evicted={stats.num_evicted:,} {progress.tokens_per_second:,.0f}tok/s"
    )
