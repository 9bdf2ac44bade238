"""Private files that are there whole or not at all.

A file is written into a temporary folder beside its place, flushed to the disk, and moved. After a
crash or a power cut the old file is there or the new one, never a part of one, and what was left
in temporary folders is removed when the session is opened next (`clean`).
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamchat.errors import SessionError

PRIVATE_FOLDER = 0o700
PRIVATE_FILE = 0o600

TEMPORARY = ".tmp"
"""How temporary folders' names end."""

COMPANIONS = ("-wal", "-shm", "-journal")
"""What SQLite keeps beside a database. A new database must not meet them."""


@contextmanager
def told(what: str) -> Iterator[None]:
    """Raise what the system refuses as an error of ours.

    Args:
        what: What could not be done, as in "cannot save the session".

    Raises:
        SessionError: With the system's reason.
    """
    try:
        yield
    except OSError as error:
        raise SessionError(f"{what}: {error.strerror or error}") from error


def make_private_folder(folder: Path) -> None:
    """Make a folder that only its owner can enter; its parents, too, where they are missing."""
    folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    make_private(folder, PRIVATE_FOLDER)


def make_private(path: Path, mode: int) -> None:
    """Take others' permissions from a file or folder.

    Some file systems, as those of memory cards, know none: there it is as private as the whole of
    them.
    """
    if path.stat().st_mode & ~mode & 0o777:
        with contextlib.suppress(PermissionError):
            path.chmod(mode)


def make_private_file(path: Path) -> None:
    """Make an empty file that only its owner can read, unless it is there."""
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, PRIVATE_FILE))
    make_private(path, PRIVATE_FILE)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot flush a folder
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write a new version of a file, which then takes its place in one step.

    Args:
        path: The file; need not be there.

    Yields:
        Path of the new version. If the block raises, the old one stays.
    """
    work = Path(tempfile.mkdtemp(prefix=f"{path.name}.", suffix=TEMPORARY, dir=path.parent))
    try:
        draft = work / path.name
        yield draft
        make_private(draft, PRIVATE_FILE)
        sync(draft)
        draft.replace(path)
        sync(path.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def clean(folder: Path) -> None:
    """Remove what a crash has left half written. The caller has the folder to itself."""
    for left in folder.glob(f"*{TEMPORARY}"):
        shutil.rmtree(left, ignore_errors=True)


def put_aside(path: Path) -> Path:
    """Move a damaged file out of the way, with what belongs to it; nothing is deleted.

    Args:
        path: The file, which becomes `NAME.damaged-1` (or the first number that is free).

    Returns:
        Its new path.

    Raises:
        SessionError: If it cannot be moved.
    """
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    with told(f"cannot put {path} aside"):
        # Companions first: a journal left alone would be applied to the next database.
        for end in (*COMPANIONS, ""):
            part = path.with_name(path.name + end)
            if part.exists():
                part.replace(aside.with_name(aside.name + end))
    return aside
