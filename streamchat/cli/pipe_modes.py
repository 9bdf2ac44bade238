"""The modes of `pipe`: wire reader, engine and output, and sum up."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import RawIOBase
from typing import TYPE_CHECKING, Any

from streamchat.cli.options import NO_END_TOKEN
from streamchat.cli.pipe_saving import Saver, Saving
from streamchat.cli.signals import EXIT_CODES, StopRequest
from streamchat.config import CacheConfig, SamplingConfig
from streamchat.engine.stream import Stream
from streamchat.events import (
    Answer,
    FellBehind,
    LineScored,
    Note,
    Progress,
    Reply,
    TurnsEvicted,
)
from streamchat.model.load import LoadedModel
from streamchat.pipe.aside import Aside
from streamchat.pipe.checkpoint import Course, open_log
from streamchat.pipe.formats.detect import PLAIN
from streamchat.pipe.lag import LagMeter
from streamchat.pipe.lines import MAX_PIECE_CHARS
from streamchat.pipe.notes import NotesConfig, NoteTaker
from streamchat.pipe.parser import Parser
from streamchat.pipe.place import Place
from streamchat.pipe.reader import Reader
from streamchat.pipe.scorer import Scorer
from streamchat.pipe.surprise import Threshold
from streamchat.pipe.turns import Unit
from streamchat.ui.console import Messages
from streamchat.ui.lines import (
    Written,
    fell_behind,
    json_line,
    plain_line,
    text_of,
    to_json,
    turns_evicted,
)
from streamchat.ui.output import Output
from streamchat.ui.status import StatusLine
from streamchat.ui.typed import Typed

if TYPE_CHECKING:
    from streamchat.chat.conversation import Conversation

Event = Written | TurnsEvicted | FellBehind | Progress
Events = Iterator[Event]
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
        typed: Where the user types questions, or None.
        max_lag: Seconds from which lines that wait are dropped, or None.
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
    typed: Typed | None = None
    max_lag: float | None = None

    def asked(self) -> str | None:
        """The next question that the user has typed, if any."""
        return None if self.typed is None else self.typed.take()


def score(run: Run, threshold: Threshold | None) -> int:
    """How surprising each line is, or those that are; returns the exit code."""
    scorer = Scorer(Stream(run.loaded, run.cache), threshold)
    course = Course(mode=run.mode, stream=scorer.stream, pack=scorer.pack, unpack=scorer.unpack)
    return _drive(run, course, scorer.run)


def reply(run: Run, conversation: "Conversation", unit: Unit, idle_seconds: float) -> int:
    """An answer for each unit; returns the exit code."""
    from streamchat.pipe.reply import pack, unpack
    from streamchat.pipe.reply import reply as work

    course = Course(
        mode=run.mode,
        stream=conversation.stream,
        pack=partial(pack, conversation),
        unpack=partial(unpack, conversation),
        sampler=conversation.sampler,
    )
    answer = partial(work, conversation, unit=unit, idle_seconds=idle_seconds)
    return _drive(run, course, answer)


def notes(run: Run, config: NotesConfig) -> int:
    """Running notes; returns the exit code."""
    taker = NoteTaker(run.loaded, run.cache, config)
    course = Course(mode=run.mode, stream=taker.stream, pack=taker.pack, unpack=taker.unpack)
    take = partial(taker.take, asked=run.asked)
    return _drive(run, course, take, max_piece_chars=taker.max_piece_chars)


def listen(
    run: Run, prompt: str | None, sampling: SamplingConfig, max_new: int, stop: Sequence[str]
) -> int:
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
        aside = Aside(
            listener.template, max_new_tokens=max_new, sampling=sampling, stop=tuple(stop)
        )
        return _drive(run, course, partial(listener.listen, aside=aside, asked=run.asked))


def _drive(run: Run, course: Course, work: Work, *, max_piece_chars: int = MAX_PIECE_CHARS) -> int:
    """Write events as they come; returns the exit code."""
    messages, output = run.messages, Output()
    status = _Status(messages, str if run.typed is None else run.typed.draft)
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
        max_lag=run.max_lag,
    )
    stop = StopRequest(reader.stop, tuple(EXIT_CODES))
    answers = run.mode in ("notes", "reply") or run.typed is not None
    messages.say(
        f"{run.loaded.source.name} on {run.loaded.device.type}, {cache.describe()}"
        f"{', waiting for input' if reader.is_live else ''}"
        f"{', ask at any time' if run.typed is not None else ''}"
        f"{NO_END_TOKEN if answers and not run.loaded.end_ids else ''}"
    )
    plain = text_of if run.mode == "filter" else plain_line
    render = json_line if run.as_json else plain
    try:
        is_continued = saver is None or saver.catch_up(reader)
        is_resumed = saver is not None and saver.is_resumed
        if run.as_json and not (is_resumed and is_continued):
            output.line(to_json(_start(run, cache, place if is_resumed else None)))
        if saver is not None:
            saver.begin(summary.pack())
        for event in _with_dropped(work(reader, stop, place), reader):
            if isinstance(event, Progress) and reader.is_live and event.lag_seconds is None:
                event = replace(event, lag_seconds=0.0)  # nothing waits
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
                if run.as_json:
                    output.line(json_line(event))
            elif isinstance(event, FellBehind):
                status.clear()
                messages.say(fell_behind(event))
                if run.as_json:
                    output.line(json_line(event))
            else:
                if output.is_terminal:
                    status.clear()
                elif isinstance(event, Answer):  # for who asked, too
                    status.clear()
                    messages.say(f"answer to “{event.question}”: {event.text}")
                output.line(render(event))
        if run.as_json:
            output.line(to_json({"event": "end", **summary.fields()}))
    finally:
        reader.stop()
        status.clear()
    messages.say(f"{'stopped' if stop() else 'end of input'}: {summary.words()}")
    code = 0 if saver is None else saver.end()
    return stop.exit_code or code


def _with_dropped(events: Events, reader: Reader) -> Events:
    """Events, and before each what was dropped until then."""
    for event in events:
        for gap in reader.take_dropped():
            yield FellBehind(
                skipped="lines",
                first_line=gap.first_line,
                last_line=gap.last_line,
                lag_seconds=gap.lag_seconds,
            )
        yield event


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
        self._num_passed = 0
        self._num_left_out = Counter[str]()
        self._lag = LagMeter()
        self.num_written = 0

    def add(self, event: Event) -> None:
        if isinstance(event, LineScored):
            self._num_scored += event.num_scored
            self._nats += event.nats
            self._num_passed += 1
        elif isinstance(event, Progress):
            num_lines = event.num_lines - (self._progress.num_lines if self._progress else 0)
            if event.lag_seconds is not None and num_lines > 0:
                self._lag.add(event.lag_seconds, num_lines)
            self._progress = event
        if isinstance(event, FellBehind):
            num_lines = event.last_line - event.first_line + 1
            is_note = event.skipped == "note"
            self._num_left_out["notes_skipped" if is_note else "lines_dropped"] += (
                1 if is_note else num_lines
            )
        self._num_notes += isinstance(event, Note)
        self._num_replies += isinstance(event, Reply)
        self.num_written += isinstance(event, Written)

    def pack(self) -> dict[str, Any]:
        """The totals, as JSON can say them."""
        return {
            "num_scored": self._num_scored,
            "nats": self._nats,
            "num_notes": self._num_notes,
            "num_replies": self._num_replies,
            "num_passed": self._num_passed,
        }

    def unpack(self, totals: Mapping[str, Any]) -> None:
        """Go on from what `pack` gave, or from nothing."""
        self._num_scored, self._nats = totals.get("num_scored", 0), totals.get("nats", 0.0)
        self._num_notes = totals.get("num_notes", 0)
        self._num_replies = totals.get("num_replies", 0)
        self._num_passed = totals.get("num_passed", 0)

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
        elif self._mode == "filter":
            fields["passed"] = self._num_passed
        fields |= self._num_left_out
        if (lag := self._lag.quantile(0.95)) is not None:
            fields["lag_p95"] = round(lag, 3)
            fields["lag_max"] = round(self._lag.longest, 3)
        return fields

    def words(self) -> str:
        """For the last line on standard error."""
        parts = [
            f"{value:,} {_counted(name.removeprefix('num_'), value).replace('_', ' ')}"
            for name, value in self.fields().items()
            if isinstance(value, int)
        ]
        if self._mode == "score" and self._num_scored:
            parts.append(f"{self._nats / self._num_scored:.4f} nats per token on average")
        if (lag := self._lag.quantile(0.95)) is not None:
            parts.append(f"95 % within {lag:.1f} s, all within {self._lag.longest:.1f} s")
        return ", ".join(parts)


def _counted(name: str, number: int) -> str:
    """A plural, or its singular for one."""
    if number != 1:
        return name
    one = {"replies": "reply", "lines_dropped": "line_dropped", "notes_skipped": "note_skipped"}
    return one.get(name, name.removesuffix("s"))
