"""How much of the output was written when a checkpoint was made, where that can be known.

A file on standard output has a length: what stands behind the checkpoint's is cut off before a run
goes on, and comes again. A pipe or a terminal has taken what it was given.
"""

import os
import stat
import sys
from dataclasses import dataclass

from streamchat.errors import OutputError

if sys.platform != "win32":
    import fcntl


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a file.

    Attributes:
        device: Of the file.
        inode: Of the file: two files never share both.
        position: Bytes before the place.
    """

    device: int
    inode: int
    position: int


def mark(handle: int) -> Mark | None:
    """Where the next byte goes, once all before it is on the disk; None if it is no file.

    Raises:
        OutputError: If the disk does not take what was written.
    """
    about = os.fstat(handle)
    if not stat.S_ISREG(about.st_mode):
        return None
    try:
        os.fsync(handle)
    except OSError as error:
        raise OutputError(f"cannot write to standard output: {error.strerror}") from error
    at_end = os.fstat(handle).st_size
    position = at_end if _appends(handle) else os.lseek(handle, 0, os.SEEK_CUR)
    return Mark(about.st_dev, about.st_ino, position)


def cut(handle: int, marked: Mark) -> bool:
    """Go back to a mark: cut off what stands behind it.

    Returns:
        Whether it is the same file and everything before the mark is there; else nothing is done.

    Raises:
        OutputError: If it cannot be cut.
    """
    about = os.fstat(handle)
    if (about.st_dev, about.st_ino) != (marked.device, marked.inode):
        return False
    if about.st_size < marked.position:
        return False
    try:
        os.ftruncate(handle, marked.position)
        os.lseek(handle, marked.position, os.SEEK_SET)
    except OSError as error:
        raise OutputError(f"cannot cut standard output's file: {error.strerror}") from error
    return True


def _appends(handle: int) -> bool:
    """Whether each write goes to the end of the file, wherever the last one went."""
    if sys.platform == "win32":  # there `>>` goes to the end once, when the file is opened
        return False
    return bool(fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_APPEND)
