"""Where sessions live, and who may use one: a folder each, open in one process at a time.

A session's folder holds its log, its state and its lock, and nothing of it is anywhere else. So it
is deleted by deleting the folder, and one that is damaged harms no other.
"""

import contextlib
import os
import re
import shutil
import tempfile
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout
from platformdirs import user_data_path

from streamchat.errors import SessionError, SessionInUseError, UsageError
from streamchat.store.files import PRIVATE_FILE, clean, make_private_folder, told

FOLDER_VARIABLE = "STREAMCHAT_DATA"
"""Environment variable with another place for sessions than the user's data directory."""

LOG_NAME = "log.sqlite"
STATE_NAME = "state.safetensors"
LOCK_NAME = "lock"
JOURNAL = f"{LOG_NAME}-wal"

MAX_NAME_BYTES = 64

GONE = ".gone-"
"""How the names of folders begin that are being deleted; no session's name does."""

WAIT_SECONDS = 10.0
"""How long opening or deleting waits for others that are at it, which takes milliseconds."""

# Names that Windows gives to devices, in whatever folder and with whatever ending.
_DEVICES = {"con", "prn", "aux", "nul", *(f"{n}{i}" for n in ("com", "lpt") for i in range(1, 10))}
_NAME = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What the list of sessions shows.

    Attributes:
        name: Its name.
        used: When it was last written to, in seconds since 1970.
        num_bytes: What it takes on disk.
    """

    name: str
    used: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Session:
    """A session that is open in this process; `close` lets others in.

    Attributes:
        name: Its name.
        folder: Where it lies.
    """

    name: str
    folder: Path
    _lock: FileLock

    @property
    def log_path(self) -> Path:
        """Its log; see `log.Log`."""
        return self.folder / LOG_NAME

    @property
    def state_path(self) -> Path:
        """Its saved state; see `state.load`. Need not be there."""
        return self.folder / STATE_NAME

    def close(self) -> None:
        """Let others in. Closing twice does nothing."""
        self._lock.release()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Sessions:
    """All sessions of a user. Nothing is written before one is opened.

    Args:
        root: Where they live; `STREAMCHAT_DATA` or the user's data directory by default.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.folder = (root or _root()) / "sessions"

    def names(self) -> list[str]:
        """Names of all sessions, sorted."""
        with told(f"cannot list the sessions in {self.folder}"):
            if not self.folder.is_dir():
                return []
            return sorted(p.name for p in self.folder.iterdir() if p.is_dir() and _is_name(p.name))

    def infos(self) -> list[SessionInfo]:
        """All sessions, the last used one first."""
        with told(f"cannot list the sessions in {self.folder}"):
            found = [_info(self.folder / name) for name in self.names()]
        return sorted(found, key=lambda info: (-info.used, info.name))

    def new_name(self, now: datetime) -> str:
        """A name that no session has yet, made of date and time."""
        taken = {name.casefold() for name in self.names()}
        stem = now.strftime("%Y-%m-%d-%H%M")
        name, number = stem, 1
        while name in taken:
            number += 1
            name = f"{stem}-{number}"
        return name

    def find(self, name: str) -> Path:
        """Folder of a session, to read from while it may be open elsewhere.

        Raises:
            UsageError: If there is none of that name.
        """
        folder = self.folder / checked_name(name)
        if not folder.is_dir():
            raise UsageError(f"there is no session '{name}'; see streamchat sessions list")
        return folder

    def open(self, name: str) -> Session:
        """Open a session, or begin one; it is this process's until it is closed.

        What a crash has left half written in it is removed.

        Raises:
            UsageError: If the name cannot be one.
            SessionInUseError: If another process has it open.
            SessionError: If the folder cannot be written.
        """
        folder = self.folder / checked_name(name)
        with told(f"cannot open session {name} in {self.folder}"), self._alone():
            make_private_folder(folder)
            lock = _locked(folder)
            clean(folder)
        return Session(folder.name, folder, lock)

    def delete(self, name: str) -> None:
        """Delete a session wholly.

        Raises:
            UsageError: If there is none of that name.
            SessionInUseError: If another process has it open.
            SessionError: If it cannot be deleted.
        """
        folder = self.find(name)
        with told(f"cannot delete session {name}"), self._alone():
            # Nobody else gets the lock while we are alone; Windows moves no folder with open files.
            _locked(folder).release()
            # Moved first: one that is half deleted is no session any more.
            gone = Path(tempfile.mkdtemp(prefix=GONE, dir=self.folder))
            folder.replace(gone / folder.name)
            shutil.rmtree(gone)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else opens or deletes a session meanwhile."""
        make_private_folder(self.folder)
        try:
            with FileLock(self.folder / ".lock", timeout=WAIT_SECONDS, mode=PRIVATE_FILE):
                for left in self.folder.glob(f"{GONE}*"):
                    shutil.rmtree(left, ignore_errors=True)
                yield
        except Timeout as error:
            raise SessionError(f"another process keeps {self.folder} locked") from error


def checked_name(name: str) -> str:
    """A session's name in the form it has on disk.

    Raises:
        UsageError: If it cannot be one: letters, digits, and `_`, `-`, `.` inside.
    """
    name = unicodedata.normalize("NFC", name)
    if not _is_name(name):
        raise UsageError(
            f"a session's name is made of letters, digits and - _ . (up to {MAX_NAME_BYTES} "
            f"bytes), and begins with a letter or digit; got {name!r}"
        )
    return name


def _is_name(name: str) -> bool:
    return (
        _NAME.fullmatch(name) is not None
        and len(name.encode()) <= MAX_NAME_BYTES
        and not name.endswith(".")
        and name.partition(".")[0].casefold() not in _DEVICES
    )


def _root() -> Path:
    override = os.environ.get(FOLDER_VARIABLE)
    if override:
        return Path(override).expanduser()
    return user_data_path("streamchat", appauthor=False)


def _locked(folder: Path) -> FileLock:
    # Not bound to a thread: the session may be closed by another than the one that opened it.
    lock = FileLock(folder / LOCK_NAME, timeout=0, mode=PRIVATE_FILE, thread_local=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise SessionInUseError(f"session {folder.name} is in use by another process") from error
    return lock


def _info(folder: Path) -> SessionInfo:
    used, num_bytes = 0.0, 0
    with contextlib.suppress(FileNotFoundError):  # another process may delete while we look
        for path in folder.iterdir():
            stat = path.stat()
            num_bytes += stat.st_size
            # A reader of the log makes an empty journal: that is no use of the session.
            if path.name in (LOG_NAME, STATE_NAME) or (path.name == JOURNAL and stat.st_size):
                used = max(used, stat.st_mtime)
    return SessionInfo(folder.name, used, num_bytes)
