"""What is written of a chat to its session, in the background and in the order of the calls.

The log is committed before the state is saved, so that it is never behind: passages that could not
be written wait for the next time, and until then no state is saved.
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamchat.errors import DamagedError, SessionError, UsageError
from streamchat.store.background import Background
from streamchat.store.files import put_aside, replacing, told
from streamchat.store.folder import Session, Sessions
from streamchat.store.log import Eviction, Log, Passage

if TYPE_CHECKING:
    from streamchat.store.state import SavedState


MAX_PASSAGES = 3000
"""Read of a log when it is opened: a turn has up to three."""


class Journal:
    """An open session of a chat.

    Args:
        sessions: Where it lives.
        name: Its name; it is begun if there is none.

    Attributes:
        notices: What the user must know of how it was opened.

    Raises:
        UsageError: If the name cannot be one.
        SessionInUseError: If another process has it open.
        SessionError: If its files cannot be written.
    """

    def __init__(self, sessions: Sessions, name: str) -> None:
        self._sessions = sessions
        self.session: Session = sessions.open(name)
        self.notices: list[str] = []
        self._background = Background()
        self._pending: list[Passage] = []
        self._unsaved: Callable[[int], SavedState] | None = None
        self._is_closed = False
        try:
            self.log = self._open_log(self.session.log_path)
            self._last_id = self.log.last_id()
        except BaseException:
            self._background.close()
            self.session.close()
            raise

    @property
    def name(self) -> str:
        """The session's name."""
        return self.session.name

    @property
    def state_path(self) -> Path:
        """Where its state is saved."""
        return self.session.state_path

    def _open_log(self, path: Path) -> Log:
        """The log, of which all that a chat reads has been read once."""
        try:
            return _checked(Log(path))
        except DamagedError as error:
            aside = put_aside(path)
            self.notices.append(f"{error}; put aside as {aside.name}, a new log begins")
            return Log(path)

    def newest(self) -> list[Passage]:
        """The newest passages, oldest first: of as many turns as a conversation remembers."""
        return self.log.newest(MAX_PASSAGES)

    def is_empty(self) -> bool:
        """Whether nothing was ever said in it."""
        return not self.log.num_passages() and not self.state_path.exists()

    # Written in the background

    def add(self, passages: Sequence[Passage]) -> None:
        """Log what was said; both sides of a turn are there, or none."""
        self._background.submit(lambda: self._add(passages))

    def _add(self, passages: Sequence[Passage]) -> None:
        self._pending += passages
        if self._pending:
            self._last_id = self.log.append(self._pending)[-1]
            self._pending.clear()

    def add_eviction(self, first: int, last: int) -> None:
        """Log that positions of the log have left the window."""
        eviction = Eviction(first, last, time.time())
        self._background.submit(lambda: self.log.add_eviction(eviction))

    def take_back(self, turn: int, begin: int) -> None:
        """Remove a turn, and what came after it.

        Args:
            turn: Its number.
            begin: Position of the log from which on that number is meant.
        """
        self._background.submit(lambda: self._take_back(turn, begin))

    def _take_back(self, turn: int, begin: int) -> None:
        self._pending = [passage for passage in self._pending if passage.turn != turn]
        first = self.log.first_of_turn(turn, begin)
        if first is not None:
            self.log.remove(first)
            self._last_id = self.log.last_id()

    def set_settings(self, values: Mapping[str, Any]) -> None:
        """Set some settings of the session."""
        self._background.submit(lambda: self.log.set_settings(values))

    def set_metadata(self, values: Mapping[str, Any]) -> None:
        """Set some metadata of the session."""
        self._background.submit(lambda: self.log.set_metadata(values))

    def save(self, make: "Callable[[int], SavedState]") -> None:
        """Save the state; of several that wait only the newest one.

        Args:
            make: Makes it, from the id of the newest passage in the log.
        """
        self._background.submit(lambda: self._save(make), replaces="state")

    def _save(self, make: "Callable[[int], SavedState]") -> None:
        # Imported late: it imports torch.
        from streamchat.store.state import save

        self._unsaved = make
        if not self._pending:
            save(self.state_path, make(self._last_id))
            self._unsaved = None

    def _try_again(self) -> None:
        """Write what could not be written before."""
        self._add(())
        if self._unsaved is not None:
            self._save(self._unsaved)

    def flush(self) -> None:
        """Wait until all that was given to write is written."""
        self._background.flush()

    def take_errors(self) -> list[str]:
        """What could not be written since this was asked last, each thing once."""
        return list(dict.fromkeys(str(error) for error in self._background.take_errors()))

    # The session as a whole

    def copy(self, name: str) -> None:
        """Keep the session as it is now under another name, too.

        Raises:
            UsageError: If there is one of that name.
            SessionError: If it cannot be written.
        """
        if name in self._sessions.names():
            raise UsageError(f"there is a session '{name}' already")
        with self._sessions.open(name) as other:
            self.log.copy_to(other.log_path)
            if self.state_path.exists():
                with told(f"cannot save session {name}"), replacing(other.state_path) as draft:
                    shutil.copyfile(self.state_path, draft)

    def open_other(self, name: str) -> "Journal":
        """Open another session of this user that is there."""
        self._sessions.find(name)
        return Journal(self._sessions, name)

    def close(self) -> None:
        """Write all that waits, and let others in. One in which nothing was said is removed.

        Closing twice does nothing.
        """
        if self._is_closed:
            return
        self._is_closed, is_empty = True, False
        try:
            self._background.submit(self._try_again)
            self._background.close()
            with contextlib.suppress(SessionError):  # it is damaged: then it is not empty
                is_empty = self.is_empty() and not self.notices
            self.log.close()
        finally:
            self.session.close()
        if is_empty:
            with contextlib.suppress(SessionError, UsageError):
                self._sessions.delete(self.name)


def _checked(log: Log) -> Log:
    """The log, if what a chat reads of it can be read.

    Raises:
        DamagedError: If not.
    """
    try:
        log.newest(MAX_PASSAGES)
        log.settings()
        log.metadata()
    except BaseException:
        log.close()
        raise
    return log
