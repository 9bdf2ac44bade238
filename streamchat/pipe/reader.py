"""Read input in the background, a little ahead and no further.

A thread reads and splits; the queue between it and the model is short, so a producer that is faster
than the model is held back, and memory stays bounded.
"""

import os
import queue
import stat
import threading
from collections.abc import Sequence
from io import RawIOBase

from streamchat.errors import InputError
from streamchat.pipe.lines import MAX_PIECE_CHARS, LineSplitter, Piece

READ_BYTES = 1 << 14
QUEUE_READS = 4
NON_BLOCKING_SECONDS = 0.05


class Reader:
    """Lines of several inputs, one after another, numbered through.

    Args:
        files: Open, unbuffered binary files.
        max_piece_chars: Where long lines are cut.
    """

    def __init__(
        self, files: Sequence[RawIOBase], *, max_piece_chars: int = MAX_PIECE_CHARS
    ) -> None:
        self._files = files
        self._max_piece_chars = max_piece_chars
        # None marks the end; an exception is raised where it is taken out.
        self._queue: queue.Queue[list[Piece] | Exception | None] = queue.Queue(QUEUE_READS)
        self._stopped = threading.Event()
        self.at_end = False
        self.is_live = not all(stat.S_ISREG(os.fstat(f.fileno()).st_mode) for f in files)
        threading.Thread(target=self._run, name="reader", daemon=True).start()

    def get(self, timeout: float) -> list[Piece]:
        """The next pieces; empty after `timeout` seconds without any, and at the end.

        Raises:
            InputError: If an input cannot be read.
        """
        if self.at_end:
            return []
        try:
            item = self._queue.get(timeout=timeout) if timeout else self._queue.get_nowait()
        except queue.Empty:
            return []
        if isinstance(item, Exception):
            raise InputError(f"cannot read the input: {item}") from item
        if item is None:
            self.at_end = True
            return []
        return item

    def stop(self) -> None:
        """Read no more; what is in the queue is dropped."""
        self._stopped.set()
        self.at_end = True

    def _run(self) -> None:
        first_line = 1
        try:
            for file in self._files:
                splitter = LineSplitter(first_line, self._max_piece_chars)
                while (data := file.read(READ_BYTES)) != b"":
                    if self._stopped.is_set():
                        return
                    if data is None:  # a non-blocking input that has nothing yet
                        self._stopped.wait(NON_BLOCKING_SECONDS)
                        continue
                    self._put(splitter.push(data))
                self._put(splitter.close())
                first_line = splitter.next_line
            self._put_item(None)
        except Exception as error:  # raised again where the lines are taken
            self._put_item(error)

    def _put(self, pieces: list[Piece]) -> None:
        if pieces:
            self._put_item(pieces)

    def _put_item(self, item: list[Piece] | Exception | None) -> None:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=0.2)
            except queue.Full:
                continue
            return
