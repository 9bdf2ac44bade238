"""Checkpoints of a pipe: kill it at any moment, and go on from the last one as if nothing had been.

A checkpoint is a moment between two batches (or answers) of a run that nobody disturbs: the stream
after all that has been taken, and nothing else; how far input and output are at that moment. So
going on makes the same batches, and the numbers are the same to the last bit.

An input that is a file is read again from its start, through the same parser, and what was taken
is passed over: that restores whatever a format remembers, and shows whether it is the same input.
It takes a small part of the time that the model took: 100,000 lines a second are passed over.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamchat.chat.saved import pack, unpack, why_not
from streamchat.engine.generate import Sampler
from streamchat.engine.stream import Stream
from streamchat.errors import DamagedError, InputError, SessionError, UsageError
from streamchat.pipe.interval import Interval
from streamchat.pipe.place import Place
from streamchat.pipe.reader import Reader
from streamchat.pipe.score import POLL_SECONDS
from streamchat.pipe.written import Mark, cut, mark
from streamchat.store.files import put_aside
from streamchat.store.folder import Session
from streamchat.store.log import Log
from streamchat.store.state import SavedState, differences, load, save

VERSION = 2
"""Of what a checkpoint says beside the stream's own state."""


def _nothing() -> dict[str, Any]:
    return {}


def _ignore(_: object) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """A mode under way.

    Attributes:
        mode: Its name.
        stream: What it feeds.
        pack: Gives what it needs beside the stream, as JSON can say it.
        unpack: Takes that back.
        catch_up: Deals with what else has happened after the checkpoint.
        sampler: Whose random numbers go on, or None.
    """

    mode: str
    stream: Stream
    pack: Callable[[], dict[str, Any]] = _nothing
    unpack: Callable[[Mapping[str, Any]], None] = _ignore
    catch_up: Callable[[Place], None] = _ignore
    sampler: Sampler | None = None


def find(session: Session, *, resume: bool) -> SavedState | None:
    """The checkpoint of a session; None if there is none yet.

    Args:
        session: Open.
        resume: Whether the user wants to go on from it.

    Raises:
        UsageError: If there is one, and the user does not; or it is not a pipe's.
        SessionError: If it is damaged: it has been put aside then.
    """
    path = session.state_path
    if not path.exists():
        return None
    if not resume:
        raise UsageError(
            f"session {session.name} has a checkpoint: --resume goes on from it, "
            "another --session begins anew"
        )
    try:
        saved = load(path)
    except DamagedError as error:
        what = "begins at the start of the input"
        raise _put_aside(error, session, path, what) from error
    if "pipe" not in saved.meta["own"]:
        raise UsageError(f"session {session.name} was saved by chat: pipe cannot go on from it")
    return saved


def open_log(session: Session) -> Log:
    """The log of a session.

    Raises:
        SessionError: If it is damaged: it has been put aside then.
    """
    try:
        return Log(session.log_path)
    except DamagedError as error:
        raise _put_aside(error, session, session.log_path, "goes on with an empty one") from error


def _put_aside(error: DamagedError, session: Session, path: Path, what: str) -> SessionError:
    aside = put_aside(path)
    return SessionError(
        f"{error}; it is now {aside.name}, and the next run of session {session.name} {what}"
    )


class Checkpoints:
    """Saves a mode's course, and brings it back.

    Args:
        session: Where to save.
        course: What.
        settings: What else must be the same for the output to be the same, in words for the user.
        output: Descriptor of standard output, or None if it is closed.
        interval: How often.
        is_live: Whether the input cannot be read again.

    Attributes:
        place: How far the course has come in the input.
        is_saved: Whether the last attempt to save has succeeded.
    """

    def __init__(
        self,
        session: Session,
        course: Course,
        settings: Mapping[str, Any],
        output: int | None,
        interval: Interval,
        *,
        is_live: bool,
    ) -> None:
        self.place = Place()
        self._session = session
        self._course = course
        self._settings = {
            "checkpoint version": VERSION,
            "mode": course.mode,
            "input": "a pipe" if is_live else "a file",
            **settings,
        }
        self._output = output
        self._interval = interval
        self._is_live = is_live
        self.is_saved = False
        self._saved_key: tuple[int, int] | None = None
        self._saved_position = 0
        self._saved_at = time.monotonic()
        self._mark: Mark | None = None

    def restore(self, saved: SavedState) -> dict[str, Any]:
        """Bring the course back to a checkpoint, and `place` with it.

        Returns:
            The totals that were saved with it.

        Raises:
            UsageError: If something differs that the output depends on.
        """
        course, own = self._course, saved.meta["own"]
        pipe = own["pipe"]
        config = course.stream.cache.config
        reasons = differences(pipe["settings"], self._settings)
        reasons += why_not(saved, course.stream.loaded, config)
        if reasons:
            raise UsageError(
                f"session {self._session.name} cannot go on as it was: {'; '.join(reasons)}"
            )
        state, _, tensors = unpack(saved, config)
        course.stream.restore(state)
        course.unpack(own)
        if course.sampler is not None:
            course.sampler.set_random_state(tensors["random"])
        self.place = Place(**pipe["place"])
        self._mark = None if pipe["output"] is None else Mark(**pipe["output"])
        return dict(pipe["totals"])

    def pass_over(self, reader: Reader) -> None:
        """Pass over what was taken before the checkpoint, if the input is a file.

        A reader that is stopped meanwhile leaves nothing to do.

        Raises:
            InputError: If something else stands there.
        """
        if self._is_live:
            return
        passed = Place()
        while passed.num_pieces < self.place.num_pieces:
            pieces = reader.get(POLL_SECONDS)
            if not pieces and reader.at_end:
                break
            taken = pieces[: self.place.num_pieces - passed.num_pieces]
            passed.add(taken)
            reader.give_back(pieces[len(taken) :])
        if reader.is_stopped or passed.is_at(self.place):
            return
        if passed.num_pieces < self.place.num_pieces:
            problem = (
                f"it ends in line {passed.last_line}, and line {self.place.last_line} was read"
            )
        else:
            problem = f"it differs in line {self.place.last_line} or above"
        raise InputError(
            f"the input is not the one that session {self._session.name} has read: {problem}"
        )

    def cut_output(self) -> bool:
        """Cut off what was written after the checkpoint, for it comes again.

        Returns:
            Whether the output goes on in the file it was written to. If not, what comes may have
            been written before: all of it stands behind the checkpoint.

        Raises:
            OutputError: If it cannot be cut.
        """
        return self._mark is not None and self._output is not None and cut(self._output, self._mark)

    def save_if_due(self, num_written: int, totals: Mapping[str, Any]) -> None:
        """Save after each interval; see `save`."""
        tokens, seconds = self._interval.tokens, self._interval.seconds
        num_tokens = self._course.stream.position - self._saved_position
        is_due = tokens is not None and num_tokens >= tokens
        if is_due or (seconds is not None and time.monotonic() - self._saved_at >= seconds):
            self.save(num_written, totals)

    def save(self, num_written: int, totals: Mapping[str, Any]) -> None:
        """Save, unless that has been done for the same moment. Only between batches.

        What a mode makes of a file because it has come to its end, or was stopped, belongs to no
        undisturbed run over a longer one: it stands behind the checkpoint.

        Args:
            num_written: Lines of output so far; all of them have been written.
            totals: What to give back at `restore`.

        Raises:
            OutputError: If the disk does not take what was written.
            SessionError: If it cannot be saved; the checkpoint before is still there.
        """
        course = self._course
        key = (self.place.num_pieces, num_written if self._is_live else 0)
        if key == self._saved_key:
            return
        self.is_saved = False
        self._saved_at, self._saved_position = time.monotonic(), course.stream.position
        marked = None if self._output is None else mark(self._output)
        meta = {
            "mode": course.mode,
            **course.pack(),
            "pipe": {
                "settings": self._settings,
                "place": asdict(self.place),
                "output": None if marked is None else asdict(marked),
                "totals": dict(totals),
            },
        }
        tensors = {} if course.sampler is None else {"random": course.sampler.random_state()}
        stream = course.stream
        packed = pack(stream.loaded, stream.cache.config, stream.snapshot(), meta, tensors)
        save(self._session.state_path, packed)
        self._saved_key, self.is_saved = key, True
