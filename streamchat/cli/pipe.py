"""`streamchat pipe`: standard input or files, for ever."""

import sys
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from streamchat.cli.options import (
    SINKS_DEFAULT,
    WINDOW_DEFAULT,
    ColorChoice,
    ColorOption,
    DebugOption,
    DeviceOption,
    DtypeOption,
    ModelChoice,
    ModelOption,
    NoSelfCheckOption,
    QuietOption,
    RemoteCodeOption,
    SinksOption,
    WindowOption,
    session_of,
)
from streamchat.config import CacheConfig
from streamchat.errors import UsageError
from streamchat.events import LineScored, StreamStats
from streamchat.ui.console import Messages, is_tty

if TYPE_CHECKING:
    from streamchat.model.load import LoadedModel

EPILOG = """
Examples:

    streamchat pipe --mode score < captions.txt

    journalctl -f | streamchat pipe --mode score --json

    streamchat pipe --mode score server.log | sort -rn | head
"""


class Mode(str, Enum):
    """Values of --mode."""

    score = "score"


def pipe(
    ctx: typer.Context,
    mode: Annotated[
        Mode,
        typer.Option(help="score: how surprising each line is, in nats per token."),
    ],
    files: Annotated[
        list[str] | None, typer.Argument(help="Read these instead of standard input (- is it).")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    model: ModelOption = None,
    sinks: SinksOption = SINKS_DEFAULT,
    window: WindowOption = WINDOW_DEFAULT,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    trust_remote_code: RemoteCodeOption = False,
    no_self_check: NoSelfCheckOption = False,
    debug: DebugOption = False,
    quiet: QuietOption = False,
    color: ColorOption = ColorChoice.auto,
) -> int:
    """Read text that never ends, and answer before its end.

    Each line's result is written as soon as the line is there. Data goes to standard output,
    everything else to standard error. Ctrl-C stops reading and finishes what is in hand; a second
    one stops at once.
    """
    messages = session_of(ctx).also(debug=debug, quiet=quiet, color=color)
    cache = CacheConfig(sink_size=sinks, window_size=window)
    choice = ModelChoice(model, cache, device, dtype, trust_remote_code, no_self_check)
    with ExitStack() as stack:
        inputs = open_inputs(files or [], stack)
        loaded = choice.load(messages)
        run = {Mode.score: _score}[mode]
        return run(loaded, cache, inputs, messages, as_json=json)


def open_inputs(names: list[str], stack: ExitStack) -> list[BinaryIO]:
    """Open the inputs before anything slow happens.

    Raises:
        UsageError: If one is missing, or standard input is a terminal or closed.
    """
    opened: list[BinaryIO] = []
    for name in names or ["-"]:
        if name == "-":
            opened.append(_open_stdin())
            continue
        path = Path(name)
        if path.is_dir():
            raise UsageError(f"{name} is a folder; expected a file")
        try:
            opened.append(stack.enter_context(path.open("rb", buffering=0)))
        except OSError as error:
            raise UsageError(f"cannot read {name}: {error.strerror}") from error
    return opened


def _open_stdin() -> BinaryIO:
    if sys.stdin is None or sys.stdin.closed:
        raise UsageError("standard input is closed: pipe text in, or name a FILE")
    if is_tty(sys.stdin):
        raise UsageError(
            "nothing to read: pipe text in (COMMAND | streamchat pipe --mode score), or name a "
            "FILE; streamchat pipe --help shows more"
        )
    # A second, unbuffered file on the same descriptor: what has arrived is read at once.
    return open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)


def _score(
    loaded: "LoadedModel",
    cache: CacheConfig,
    inputs: list[BinaryIO],
    messages: Messages,
    *,
    as_json: bool,
) -> int:
    """Score the inputs; returns the exit code."""
    from streamchat.cli.signals import StopRequest
    from streamchat.engine.stream import Stream
    from streamchat.pipe.reader import Reader
    from streamchat.pipe.score import score
    from streamchat.ui.lines import json_line, plain_line, to_json
    from streamchat.ui.output import Output, ReaderGone
    from streamchat.ui.status import StatusLine

    output, status = Output(), StatusLine(messages)
    reader = Reader(inputs)
    stop = StopRequest(reader.stop)
    stream = Stream(loaded, cache)
    device = loaded.model.device.type
    messages.say(
        f"{loaded.source.name} on {device}, {cache.sink_size:,} pinned + "
        f"{cache.window_size:,} newest{', waiting for input' if reader.is_live else ''}"
    )
    render = json_line if as_json else plain_line
    summary = _Summary()
    try:
        if as_json:
            output.line(
                to_json(
                    {
                        "event": "start",
                        "model": loaded.source.name,
                        "sink_size": cache.sink_size,
                        "window_size": cache.window_size,
                    }
                )
            )
        for event in score(stream, reader, stop):
            if isinstance(event, LineScored):
                if output.is_terminal:
                    status.clear()
                summary.add(event)
                output.line(render(event))
            else:
                summary.stats = event
                output.check_reader()
                status.update(event, beside_output=output.is_terminal)
        if as_json:
            output.line(to_json({"event": "end", **summary.fields()}))
    except ReaderGone:
        return 0
    finally:
        reader.stop()
        status.clear()
    messages.say(f"{'stopped' if stop() else 'end of input'}: {summary.words()}")
    return stop.exit_code or 0


class _Summary:
    """Totals over a stream."""

    def __init__(self) -> None:
        self.stats: StreamStats | None = None
        self._num_scored = 0
        self._nats = 0.0

    def add(self, event: LineScored) -> None:
        self._num_scored += event.num_scored
        self._nats += event.nats

    def fields(self) -> dict[str, object]:
        """For the `end` event."""
        stats = self.stats
        return {
            "lines": stats.num_lines if stats else 0,
            "num_tokens": stats.num_tokens if stats else 0,
            "num_evicted": stats.num_evicted if stats else 0,
            "nats_per_token": round(self._nats / self._num_scored, 4) if self._num_scored else None,
        }

    def words(self) -> str:
        """For the last line on standard error."""
        fields = self.fields()
        mean = fields["nats_per_token"]
        text = (
            f"{fields['lines']:,} lines, {fields['num_tokens']:,} tokens, "
            f"{fields['num_evicted']:,} evicted"
        )
        return text if mean is None else f"{text}, {mean} nats per token on average"
