"""Read input in the background, a little ahead and no further.

A thread reads and splits; the queue between it and the model is short, so a producer that is faster
than the model is held back, and memory stays bounded. The input's format is read where lines are
taken out, so that a pause in the input may complete what waits for more.
"""

import os
import queue
import stat
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from io import RawIOBase

from streamchat.errors import InputError
from streamchat.pipe.lines import MAX_PIECE_CHARS, LineSplitter, Piece
from streamchat.pipe.parser import Parser

READ_BYTES = 1 << 14
QUEUE_READS = 4
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
    """

    file: int
    pieces: list[Piece]
    is_last: bool


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
    """

    def __init__(
        self,
        files: Sequence[RawIOBase],
        *,
        max_piece_chars: int = MAX_PIECE_CHARS,
        parsers: Sequence[Parser] = (),
        first_line: int = 1,
        is_replayed: bool = False,
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
        self._queue: queue.Queue[Read | Exception | None] = queue.Queue(QUEUE_READS)
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

    def _parse(self, item: Read | Exception | None) -> list[Piece]:
        """Pieces of the cues that a read completes; an input that fails is at its end."""
        self._last_read = time.monotonic()
        if isinstance(item, Read):
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
                    if pieces := splitter.push(data):
                        self._put(Read(index, pieces, is_last=False))
                self._put(Read(index, splitter.close(), is_last=True))
                first_line = splitter.next_line
            self._put(None)
        except Exception as error:  # raised again where the lines are taken
            self._put(error)

    def _put(self, item: Read | Exception | None) -> None:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=0.2)
            except queue.Full:
                continue
            return
