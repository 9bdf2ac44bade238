"""What `pipe --session` adds to a run: when to save, and what to say about it."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from streamchat.config import CacheConfig
from streamchat.errors import SessionError
from streamchat.pipe.checkpoint import Checkpoints, Course
from streamchat.pipe.interval import Interval
from streamchat.pipe.place import Place
from streamchat.pipe.reader import Reader
from streamchat.store.folder import Session
from streamchat.store.state import SavedState
from streamchat.ui.console import Messages


@dataclass(slots=True)
class Saving:
    """What the command line says about it.

    Attributes:
        session: Open.
        saved: The checkpoint to go on from; None to begin. Dropped once it is read.
        options: Whatever else the output depends on.
        interval: How often to save.
        is_live: Whether the input cannot be read again.
    """

    session: Session
    saved: SavedState | None
    options: Mapping[str, Any]
    interval: Interval
    is_live: bool

    def sized(self, cache: CacheConfig) -> CacheConfig:
        """The sizes to go on with: an automatic window stays as it was when the session began."""
        if self.saved is None or not cache.is_auto:
            return cache
        size = int(self.saved.fingerprint["window_size"] or 1)
        return replace(cache, window_size=size, is_auto=False)


class Saver:
    """Saves a run as it goes.

    Args:
        saving: What the command line says.
        course: What to save.
        messages: For standard error.
    """

    def __init__(self, saving: Saving, course: Course, messages: Messages) -> None:
        self._saving, self._course, self._messages = saving, course, messages
        self._checkpoints = Checkpoints(
            saving.session,
            course,
            saving.options,
            None if sys.stdout is None else sys.stdout.fileno(),
            saving.interval,
            is_live=saving.is_live,
        )
        self.is_resumed = saving.saved is not None
        self._was_told = False

    @property
    def place(self) -> Place:
        """Where the run stands in the input."""
        return self._checkpoints.place

    def restore(self) -> dict[str, Any]:
        """Go back to the checkpoint, if there is one; returns its totals."""
        saved, self._saving.saved = self._saving.saved, None
        if saved is None:
            return {}
        totals = self._checkpoints.restore(saved)
        self._course.catch_up(self.place)
        return totals

    def catch_up(self, reader: Reader) -> bool:
        """Bring input and output to the checkpoint; returns whether the output goes on there."""
        if not self.is_resumed:
            return True
        line = self.place.last_line
        self._checkpoints.pass_over(reader)
        is_continued = self._checkpoints.cut_output()
        again = "" if is_continued else "; what was written after that comes again"
        self._messages.say(
            f"session {self._saving.session.name} goes on after line {line:,}{again}"
        )
        return is_continued

    def begin(self, totals: Mapping[str, Any]) -> None:
        """Save before anything is read: whatever stands against it is said now.

        Raises:
            SessionError: If it cannot be saved.
        """
        self._checkpoints.save(0, totals)

    def end(self) -> int:
        """Say what is saved; returns the exit code."""
        name = self._saving.session.name
        if self._checkpoints.is_saved:
            self._messages.say(f"saved: --session {name} --resume goes on from here")
        return int(not self._checkpoints.is_saved)

    def note(self, num_written: int, totals: Mapping[str, Any], *, is_end: bool) -> None:
        """Save if it is time to; if that fails, say so once, go on, and try again next time."""
        checkpoints = self._checkpoints
        try:
            if is_end:
                checkpoints.save(num_written, totals)
            else:
                checkpoints.save_if_due(num_written, totals)
        except SessionError as error:
            if not self._was_told:
                self._messages.error(f"{error}; the run goes on, and saving is tried again")
            self._was_told = True
        else:
            self._was_told = self._was_told and not checkpoints.is_saved
