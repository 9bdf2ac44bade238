"""Options that `pipe` alone has, by what they are about."""

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from streamchat.cli.settings import Checked
from streamchat.errors import UsageError
from streamchat.pipe.interval import Interval, parse_seconds
from streamchat.pipe.roll_up import Level, parse_levels
from streamchat.pipe.surprise import Threshold, parse_threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerOptions:
    """When something is written."""

    every: Annotated[
        str,
        typer.Option(
            envvar="STREAMCHAT_EVERY",
            metavar="TIME",
            help="notes: how often, as 600tok, 60s, 5m, or 600tok,5m for what comes first; auto: "
            "as seldom as the memory lets. Always early enough. Recordings go by their own times.",
        ),
        Checked(lambda text: Interval.parse(text, "--every")),
    ] = "auto"
    idle: Annotated[
        str | None,
        typer.Option(
            envvar="STREAMCHAT_IDLE",
            metavar="TIME",
            help="Live input: after so long a silence, as 5s, write the note; and answer the turn "
            "or paragraph that waits (else after 2s).",
        ),
        Checked(lambda text: parse_seconds(text, "--idle")),
    ] = None
    on_turn: Annotated[
        bool,
        typer.Option(
            "--on-turn/--no-on-turn",
            show_default=False,
            envvar="STREAMCHAT_ON_TURN",
            help="notes: one whenever another speaker begins.",
        ),
    ] = False
    by: Annotated[
        Literal["line", "turn", "paragraph"],
        typer.Option(
            envvar="STREAMCHAT_BY",
            help="reply: what is answered at once. line: each line or cue. turn: what one speaker "
            "says. paragraph: up to a blank line, or a silence of two seconds.",
        ),
    ] = "line"
    minimum: Annotated[
        str,
        typer.Option(
            "--min",
            envvar="STREAMCHAT_MIN",
            metavar="SCORE",
            help="filter: what a line needs to pass: nats per token, as 4.5, or standard "
            "deviations above the mean of the lines before, as 2sd.",
        ),
        Checked(lambda text: parse_threshold(text)),
    ] = "2sd"

    @property
    def interval(self) -> Interval:
        """Of --every."""
        return Interval.parse(self.every, "--every")

    @property
    def idle_seconds(self) -> float | None:
        """Of --idle."""
        return None if self.idle is None else parse_seconds(self.idle, "--idle")

    @property
    def threshold(self) -> Threshold:
        """Of --min."""
        return parse_threshold(self.minimum)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotesOptions:
    """What notes build on, and what is built of them."""

    carry: Annotated[
        int,
        typer.Option(
            min=0,
            envvar="STREAMCHAT_CARRY",
            metavar="K",
            help="notes: show the model its last K notes when it writes the next.",
        ),
    ] = 0
    roll_up: Annotated[
        str | None,
        typer.Option(
            envvar="STREAMCHAT_ROLL_UP",
            metavar="N",
            help="notes: sum up every N notes, or the notes of a time, as 1h; with a comma, what "
            "comes next: 10m,1h. At the end, the whole.",
        ),
        Checked(lambda text: parse_levels(text)),
    ] = None

    @property
    def levels(self) -> tuple[Level, ...]:
        """Of --roll-up."""
        return () if self.roll_up is None else parse_levels(self.roll_up)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions:
    """What happens while the input comes."""

    when_behind: Annotated[
        Literal["block", "skip-notes", "drop"],
        typer.Option(
            envvar="STREAMCHAT_WHEN_BEHIND",
            metavar="POLICY",
            help="Live input that comes faster than it is dealt with: block lets it wait, "
            "skip-notes leaves out notes until that is made up for, drop leaves out all lines that "
            "wait. Each gap is named.",
        ),
    ] = "block"
    max_lag: Annotated[
        str,
        typer.Option(
            envvar="STREAMCHAT_MAX_LAG",
            metavar="TIME",
            help="--when-behind: how far behind is too far.",
        ),
        Checked(lambda text: parse_seconds(text, "--max-lag")),
    ] = "30s"
    ask: Annotated[
        bool,
        typer.Option(
            "--ask",
            help="notes, listen: take questions from the terminal while the input streams: type, "
            "and Enter. Neither question nor answer becomes part of the stream.",
        ),
    ] = False

    def max_lag_for(self, policy: str) -> float | None:
        """Seconds of lag from which this policy does something; None if another one is chosen."""
        seconds = parse_seconds(self.max_lag, "--max-lag")
        return seconds if self.when_behind == policy else None


MODES_OF = {
    "prompt": ("notes", "reply", "listen"),
    "every": ("notes",),
    "idle": ("notes", "reply"),
    "on_turn": ("notes",),
    "by": ("reply",),
    "minimum": ("filter",),
    "carry": ("notes",),
    "roll_up": ("notes",),
    "ask": ("notes", "listen"),
}
"""Options that say nothing in other modes."""

FLAGS = {"minimum": "--min"}


def check_mode(mode: str, given: list[str], when_behind: str) -> None:
    """Whether options that were given on the command line have a meaning in a mode.

    Raises:
        UsageError: If one has none.
    """
    for name in given:
        if mode not in MODES_OF[name]:
            flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
            raise UsageError(f"{flag} is for --mode {' and '.join(MODES_OF[name])}; this is {mode}")
    if when_behind == "skip-notes" and mode != "notes":
        raise UsageError(f"--when-behind skip-notes is for --mode notes; this is {mode}")
