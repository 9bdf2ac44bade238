"""The modes of `pipe`: wire reader, engine and output, and sum up."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import RawIOBase
from typing import Any

from streamchat.cli.options import NO_END_TOKEN
from streamchat.cli.pipe_saving import Saver, Saving
from streamchat.cli.signals import EXIT_CODES, StopRequest
from streamchat.config import CacheConfig, SamplingConfig
from streamchat.engine.stream import Stream
from streamchat.events import LineScored, Note, Progress, Reply, TurnsEvicted
from streamchat.model.load import LoadedModel
from streamchat.pipe.checkpoint import Course, open_log
from streamchat.pipe.formats.detect import PLAIN
from streamchat.pipe.lines import MAX_PIECE_CHARS
from streamchat.pipe.notes import NotesConfig, NoteTaker
from streamchat.pipe.parser import Parser
from streamchat.pipe.place import Place
from streamchat.pipe.reader import Reader
from streamchat.ui.console import Messages
from streamchat.ui.lines import json_line, plain_line, to_json, turns_evicted
from streamchat.ui.output import Output
from streamchat.ui.status import StatusLine

Events = Iterator[LineScored | Note | Reply | TurnsEvicted | Progress]
Work = Callable[[Reader, Callable[[], bool], Place], Events]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the modes share.

    Attributes:
        mode: Its name.
        loaded: The model.
        cache: Sizes.
        inputs: Open files.
        names: Of the inputs, as the user gave them.
        input_format: Name of their format, or `auto`.
        messages: For standard error.
        as_json: Whether events are written as JSON.
        saving: The session, or None.
    """

    mode: str
    loaded: LoadedModel
    cache: CacheConfig
    inputs: Sequence[RawIOBase]
    names: Sequence[str]
    input_format: str
    messages: Messages
    as_json: bool
    saving: Saving | None = None


def score(run: Run) -> int:
    """How surprising each line is; returns the exit code."""
    from streamchat.pipe.score import score as work

    stream = Stream(run.loaded, run.cache)
    return _drive(run, Course(mode=run.mode, stream=stream), partial(work, stream))


def reply(
    run: Run, prompt: str | None, sampling: SamplingConfig, max_new: int, stop: Sequence[str]
) -> int:
    """An answer for each line; returns the exit code."""
    from streamchat.chat.conversation import Conversation
    from streamchat.pipe.reply import pack, unpack
    from streamchat.pipe.reply import reply as work

    conversation = Conversation(
        run.loaded,
        system=prompt,
        cache=run.cache,
        sampling=sampling,
        max_new_tokens=max_new,
        stop=stop,
    )
    course = Course(
        mode=run.mode,
        stream=conversation.stream,
        pack=partial(pack, conversation),
        unpack=partial(unpack, conversation),
        sampler=conversation.sampler,
    )
    return _drive(run, course, partial(work, conversation))


def notes(run: Run, config: NotesConfig) -> int:
    """Running notes; returns the exit code."""
    taker = NoteTaker(run.loaded, run.cache, config)
    course = Course(mode=run.mode, stream=taker.stream, pack=taker.pack, unpack=taker.unpack)
    return _drive(run, course, taker.take, max_piece_chars=taker.max_piece_chars)


def listen(run: Run, prompt: str | None) -> int:
    """Only feed, and log; returns the exit code."""
    from streamchat.pipe.listen import Listener

    assert run.saving is not None  # noqa: S101 - the command line sees to it
    is_live = run.saving.is_live
    with open_log(run.saving.session) as log:
        listener = Listener(run.loaded, run.cache, prompt, log)
        course = Course(
            mode=run.mode,
            stream=listener.stream,
            pack=listener.pack,
            unpack=listener.unpack,
            catch_up=lambda place: listener.catch_up(place, is_live=is_live),
        )
        return _drive(run, course, listener.listen)


def _drive(run: Run, course: Course, work: Work, *, max_piece_chars: int = MAX_PIECE_CHARS) -> int:
    """Write events as they come; returns the exit code."""
    messages, output, status = run.messages, Output(), _Status(run.messages)
    cache, summary = course.stream.cache.config, _Summary(run.mode)
    saver = None if run.saving is None else Saver(run.saving, course, messages)
    place = Place()
    if saver is not None:
        summary.unpack(saver.restore())
        place = saver.place
    is_replayed = run.saving is not None and not run.saving.is_live
    reader = Reader(
        run.inputs,
        max_piece_chars=max_piece_chars,
        parsers=_parsers(run, status, max_piece_chars),
        first_line=1 if is_replayed else place.last_line + 1,
        is_replayed=is_replayed,
    )
    stop = StopRequest(reader.stop, tuple(EXIT_CODES))
    answers = run.mode not in ("score", "listen")
    messages.say(
        f"{run.loaded.source.name} on {run.loaded.device.type}, {cache.describe()}"
        f"{', waiting for input' if reader.is_live else ''}"
        f"{NO_END_TOKEN if answers and not run.loaded.end_ids else ''}"
    )
    render = json_line if run.as_json else plain_line
    try:
        is_continued = saver is None or saver.catch_up(reader)
        is_resumed = saver is not None and saver.is_resumed
        if run.as_json and not (is_resumed and is_continued):
            output.line(to_json(_start(run, cache, place if is_resumed else None)))
        if saver is not None:
            saver.begin(summary.pack())
        for event in work(reader, stop, place):
            summary.add(event)
            if isinstance(event, Progress):
                output.check_reader()
                if saver is not None:
                    # At once when stopped: what comes then may fail, as on a terminal that is gone.
                    is_end = event.is_last or stop()
                    saver.note(summary.num_written, summary.pack(), is_end=is_end)
                status.update(event, beside_output=output.is_terminal)
            elif isinstance(event, TurnsEvicted):
                status.clear()
                messages.say(turns_evicted(event))
            else:
                if output.is_terminal:
                    status.clear()
                output.line(render(event))
        if run.as_json:
            output.line(to_json({"event": "end", **summary.fields()}))
    finally:
        reader.stop()
        status.clear()
    messages.say(f"{'stopped' if stop() else 'end of input'}: {summary.words()}")
    code = 0 if saver is None else saver.end()
    return stop.exit_code or code


class _Status(StatusLine):
    """A status line that ends with its terminal, and does not end the run."""

    def update(self, progress: Progress, *, beside_output: bool) -> None:
        with contextlib.suppress(OSError):
            super().update(progress, beside_output=beside_output)

    def clear(self) -> None:
        with contextlib.suppress(OSError):
            super().clear()


def _start(run: Run, cache: CacheConfig, place: Place | None) -> dict[str, object]:
    """The first event: which stream it is, and where it goes on if it was resumed."""
    resumed = {} if place is None else {"line": place.last_line}
    return {
        "event": "start" if place is None else "resume",
        **resumed,
        "mode": run.mode,
        "model": run.loaded.source.name,
        "sink_size": cache.sink_size,
        "window_size": cache.window_size,
    }


def _parsers(run: Run, status: StatusLine, max_piece_chars: int) -> list[Parser]:
    """A parser for each input; what one finds out is said, unless it is plain text."""
    has_several = len(run.names) > 1

    def parser(name: str) -> Parser:
        def say(found: str) -> None:
            if found != PLAIN:
                status.clear()
                run.messages.say(f"{f'{name}: ' if has_several else ''}input {found} (auto)")

        return Parser(
            run.input_format,
            max_piece_chars=max_piece_chars,
            file=name if has_several else None,
            on_format=say,
        )

    return [parser(name) for name in run.names]


class _Summary:
    """Totals over a stream."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._progress: Progress | None = None
        self._num_scored = 0
        self._nats = 0.0
        self._num_notes = 0
        self._num_replies = 0
        self.num_written = 0

    def add(self, event: LineScored | Note | Reply | TurnsEvicted | Progress) -> None:
        if isinstance(event, LineScored):
            self._num_scored += event.num_scored
            self._nats += event.nats
        elif isinstance(event, Progress):
            self._progress = event
        self._num_notes += isinstance(event, Note)
        self._num_replies += isinstance(event, Reply)
        self.num_written += isinstance(event, LineScored | Note | Reply)

    def pack(self) -> dict[str, Any]:
        """The totals, as JSON can say them."""
        return {
            "num_scored": self._num_scored,
            "nats": self._nats,
            "num_notes": self._num_notes,
            "num_replies": self._num_replies,
        }

    def unpack(self, totals: Mapping[str, Any]) -> None:
        """Go on from what `pack` gave, or from nothing."""
        self._num_scored, self._nats = totals.get("num_scored", 0), totals.get("nats", 0.0)
        self._num_notes = totals.get("num_notes", 0)
        self._num_replies = totals.get("num_replies", 0)

    def fields(self) -> dict[str, object]:
        """For the `end` event: totals, and what the mode has."""
        progress = self._progress
        stats = progress.stats if progress else None
        fields: dict[str, object] = {
            "lines": progress.num_lines if progress else 0,
            "num_tokens": stats.num_tokens if stats else 0,
            "num_evicted": stats.num_evicted if stats else 0,
        }
        if self._mode == "score":
            mean = self._nats / self._num_scored if self._num_scored else None
            fields["nats_per_token"] = None if mean is None else round(mean, 4)
        elif self._mode == "reply":
            fields["replies"] = self._num_replies
        elif self._mode == "notes":
            fields["notes"] = self._num_notes
            fields["unnoted"] = progress.num_unnoted if progress else 0
        return fields

    def words(self) -> str:
        """For the last line on standard error."""
        parts = [
            f"{value:,} {_counted(name.removeprefix('num_'), value)}"
            for name, value in self.fields().items()
            if isinstance(value, int)
        ]
        if self._num_scored:
            parts.append(f"{self._nats / self._num_scored:.4f} nats per token on average")
        return ", ".join(parts)


def _counted(name: str, number: int) -> str:
    """A plural, or its singular for one."""
    return {"replies": "reply"}.get(name, name.removesuffix("s")) if number == 1 else name
