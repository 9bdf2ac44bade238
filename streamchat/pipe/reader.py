"""Read input in the background, a little ahead and no further.

A thread reads and splits; what waits between it and the model is bounded, so a producer that is
faster than the model is held back, and memory stays bounded. The input's format is read where lines
are taken out, so that a pause in the input may complete what waits for more.

Each read knows when it was made: how long a live line has waited is the lag. What is still in the
system's pipe has not been read, so that a lag of more than `MAX_WAITING_BYTES` is a lower bound.
"""

import os
import queue
import stat
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import RawIOBase

from streamchat.errors import InputError
from streamchat.pipe.lines import MAX_PIECE_CHARS, LineSplitter, Piece
from streamchat.pipe.parser import Parser

READ_BYTES = 1 << 14
MAX_WAITING_BYTES = 1 << 16
"""More than an hour of speech."""

LIVE_PIECES = 8
"""Of a live input that are taken at a time."""

NON_BLOCKING_SECONDS = 0.05

PAUSE_SECONDS = 0.5
"""After so long without input, a live one has made a pause."""


@dataclass(frozen=True, slots=True)
class Read:
    """What one read completed.

    Attributes:
        file: Index of the input.
        pieces: Of its lines.
        is_last: Whether the input has ended.
        num_bytes: Read.
        arrived: When, on the monotonic clock.
    """

    file: int
    pieces: list[Piece]
    is_last: bool
    num_bytes: int = 0
    arrived: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Dropped:
    """Lines of a live input that were not dealt with, for too many waited.

    Attributes:
        first_line: Number of the first.
        last_line: Number of the last.
        lag_seconds: How long the first had waited.
    """

    first_line: int
    last_line: int
    lag_seconds: float


def is_file(file: RawIOBase) -> bool:
    """Whether an input is a file, which has an end and can be read again; a pipe is not."""
    return stat.S_ISREG(os.fstat(file.fileno()).st_mode)


class Reader:
    """Lines of several inputs, one after another, numbered through.

    Args:
        files: Open, unbuffered binary files.
        max_piece_chars: Where long lines are cut.
        parsers: One for each file, or none: then lines are given as they are.
        first_line: Number of the first line.
        is_replayed: Whether what is not taken now can be read once more, from a checkpoint.
        max_lag: Where a live line has waited for longer, in seconds, everything that waits is
            dropped; None to drop nothing.

    Attributes:
        arrived: When the lines taken last arrived, on the monotonic clock.
    """

    def __init__(
        self,
        files: Sequence[RawIOBase],
        *,
        max_piece_chars: int = MAX_PIECE_CHARS,
        parsers: Sequence[Parser] = (),
        first_line: int = 1,
        is_replayed: bool = False,
        max_lag: float | None = None,
    ) -> None:
        self._files = files
        self._parsers = parsers
        self._parser: Parser | None = None
        self._last_read = time.monotonic()
        self._failure: Exception | None = None
        self._max_piece_chars = max_piece_chars
        self._first_line = first_line
        self._returned: list[Piece] = []
        # None marks the end; an exception is raised where it is taken out.
        self._queue: queue.Queue[Read | Exception | None] = queue.Queue()
        self._room = threading.Condition()
        self._num_waiting_bytes = 0
        self._max_lag = max_lag
        self._dropped: list[Dropped] = []
        self.arrived = time.monotonic()
        self._stopped = threading.Event()
        self.at_end = False
        self.is_replayed = is_replayed
        self.is_live = not all(is_file(file) for file in files)
        threading.Thread(target=self._run, name="reader", daemon=True).start()

    def get(self, timeout: float) -> list[Piece]:
        """The next pieces; empty after `timeout` seconds without any, and at the end.

        Raises:
            InputError: If an input cannot be read.
        """
        if self._returned:
            pieces, self._returned = self._returned, []
            return pieces
        self._drop_if_late()
        deadline = time.monotonic() + timeout
        while not self.at_end:
            if self._failure is not None:
                raise InputError(f"cannot read the input: {self._failure}") from self._failure
            left = deadline - time.monotonic()
            try:
                item = self._queue.get(timeout=left) if left > 0 else self._queue.get_nowait()
            except queue.Empty:
                return self._pause()
            if pieces := self._parse(item):
                return pieces
            if left <= 0 and self._failure is None:
                break
        return []

    @property
    def lag_seconds(self) -> float:
        """How long the line has waited that is to be taken next; 0 for files and without one."""
        with self._queue.mutex:
            first = self._queue.queue[0] if self._queue.queue else None
        return time.monotonic() - first.arrived if self.is_live and isinstance(first, Read) else 0.0

    def take_dropped(self) -> list[Dropped]:
        """What was dropped since this was last asked."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def _drop_if_late(self) -> None:
        """Drop all that waits, if it has waited for too long; its format is read all the same."""
        lag = self.lag_seconds
        if self._max_lag is None or lag <= self._max_lag:
            return
        pieces: list[Piece] = []
        for _ in range(self._queue.qsize()):
            pieces += self._parse(self._queue.get_nowait())
        if pieces:
            last = pieces[-1].origin.last_line or pieces[-1].line
            self._dropped.append(Dropped(pieces[0].line, last, lag))

    def _parse(self, item: Read | Exception | None) -> list[Piece]:
        """Pieces of the cues that a read completes; an input that fails is at its end."""
        self._last_read = time.monotonic()
        if isinstance(item, Read):
            self.arrived = item.arrived
            with self._room:
                self._num_waiting_bytes -= item.num_bytes
                self._room.notify()
            if not self._parsers:
                return item.pieces
            self._parser = self._parsers[item.file]
            pieces = self._parser.push(item.pieces)
            if not item.is_last:
                return pieces
        else:
            pieces, self._failure, self.at_end = [], item, item is None
        parser, self._parser = self._parser, None
        return pieces + (parser.flush() if parser else [])

    def _pause(self) -> list[Piece]:
        """What need not wait for more, if a live input has made a pause."""
        is_pause = time.monotonic() - self._last_read >= PAUSE_SECONDS
        return self._parser.pause() if self._parser and self.is_live and is_pause else []

    @property
    def idle_seconds(self) -> float:
        """How long nothing has come; 0 while something waits to be taken."""
        if self._returned or not self._queue.empty():
            return 0.0
        return time.monotonic() - self._last_read

    def give_back(self, pieces: list[Piece]) -> None:
        """Return pieces of the last `get`, which come again with the next."""
        self._returned = pieces

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """Read no more; what is in the queue is dropped."""
        self._returned = []
        self._stopped.set()
        with self._room:
            self._room.notify()
        self.at_end = True

    def _run(self) -> None:
        first_line = self._first_line
        try:
            for index, file in enumerate(self._files):
                splitter = LineSplitter(first_line, self._max_piece_chars)
                while (data := file.read(READ_BYTES)) != b"":
                    if self._stopped.is_set():
                        return
                    if data is None:  # a non-blocking input that has nothing yet
                        self._stopped.wait(NON_BLOCKING_SECONDS)
                        continue
                    self._put_all(index, splitter.push(data), len(data))
                self._put(Read(index, splitter.close(), is_last=True))
                first_line = splitter.next_line
            self._put(None)
        except Exception as error:  # raised again where the lines are taken
            self._put(error)

    def _put_all(self, file: int, pieces: list[Piece], num_bytes: int) -> None:
        """Add what a read has completed; of a live one in groups, so that some may be dropped."""
        size = LIVE_PIECES if self.is_live else max(1, len(pieces))
        for begin in range(0, len(pieces), size):
            part = pieces[begin : begin + size]
            self._put(Read(file, part, is_last=False, num_bytes=num_bytes if not begin else 0))

    def _put(self, item: Read | Exception | None) -> None:
        """Add to what waits; bytes wait until there is room for them."""
        num_bytes = item.num_bytes if isinstance(item, Read) else 0
        if num_bytes:
            with self._room:
                self._room.wait_for(
                    lambda: self._stopped.is_set() or self._num_waiting_bytes < MAX_WAITING_BYTES
                )
                self._num_waiting_bytes += num_bytes
        if not self._stopped.is_set():
            self._queue.put(item)
