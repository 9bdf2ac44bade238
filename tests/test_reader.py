"""Reading in the background: lines as soon as they are there, and no further ahead than needed."""

import contextlib
import errno
import os
import threading
import time

import pytest

from streamchat.errors import InputError
from streamchat.pipe.lines import Piece
from streamchat.pipe.reader import MAX_WAITING_BYTES, READ_BYTES, Reader

PATIENCE = 10.0
"""Seconds to wait for something that must come; a test that fails takes that long."""


@pytest.fixture
def pipe():
    """A live input: both ends of a pipe, unbuffered."""
    read_end, write_end = os.pipe()
    # The writer is closed first: that ends a read that still waits.
    with os.fdopen(read_end, "rb", buffering=0) as file, os.fdopen(write_end, "wb", 0) as writer:
        yield file, writer


@pytest.fixture
def started():
    """`started(files)`: a reader, which is stopped after the test."""
    readers = []

    def start(files, **options):
        readers.append(Reader(files, **options))
        return readers[-1]

    yield start
    for reader in readers:
        reader.stop()


def files_of(folder, *contents):
    """Regular files, open and unbuffered."""
    opened = []
    for index, content in enumerate(contents):
        path = folder / f"{index}.txt"
        path.write_bytes(content)
        opened.append(path.open("rb", buffering=0))
    return opened


@contextlib.contextmanager
def closing_all(files):
    with contextlib.ExitStack() as stack:
        for file in files:
            stack.enter_context(file)
        yield files


def next_pieces(reader, patience=PATIENCE):
    """What comes next, or nothing at the end."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and not reader.at_end:
        if pieces := reader.get(0.05):
            return pieces
    return []


def all_pieces(reader):
    """Everything until the end."""
    pieces = []
    while got := next_pieces(reader):
        pieces += got
    assert reader.at_end
    return pieces


def wait_until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "did not come"
        time.sleep(0.005)


class FakeFile:
    """An input made of reads: bytes, or an error to raise.

    Args:
        reads: What comes; at its end, the end of the input.
    """

    def __init__(self, reads):
        self._reads = iter(reads)
        self._pipe = os.pipe()
        self.num_reads = 0
        self.largest_size = 0

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        for descriptor in self._pipe:
            os.close(descriptor)

    def fileno(self):
        return self._pipe[0]

    def read(self, size):
        self.num_reads += 1
        self.largest_size = max(size, self.largest_size)
        item = next(self._reads, b"")
        if isinstance(item, Exception):
            raise item
        return item


# Live input


def test_a_line_is_there_before_the_end_of_the_input(pipe, started):
    """Each line comes while the writer still has the pipe open; half a line waits."""
    file, writer = pipe
    reader = started([file])
    for number, text in enumerate(["one", "two", "three"], 1):
        writer.write(text.encode())
        assert reader.get(0.05) == []
        writer.write(b"\n")
        assert next_pieces(reader) == [Piece(text, number, 1, True)]
        assert not reader.at_end
    writer.write(b"the rest")
    writer.close()
    assert all_pieces(reader) == [Piece("the rest", 4, 1, True)]


def test_nothing_comes_of_nothing(pipe, started):
    """While nobody writes, `get` gives nothing after its timeout, and at once with none."""
    file, _ = pipe
    reader = started([file])
    begin = time.monotonic()
    assert reader.get(0.2) == []
    waited = time.monotonic() - begin
    assert 0.15 < waited < 5
    begin = time.monotonic()
    for _ in range(100):
        assert reader.get(0) == []
    assert time.monotonic() - begin < 5
    assert not reader.at_end


def test_what_comes_in_one_write_comes_in_one_list(pipe, started):
    """Lines that were written together are given together, in their order."""
    file, writer = pipe
    writer.write(b"a\nb\nc\n")
    assert [p.text for p in next_pieces(started([file]))] == ["a", "b", "c"]


def test_a_pipe_is_live_and_a_file_is_not(pipe, started, tmp_path):
    """Live is what may still grow: any pipe among the inputs makes them so."""
    file, _ = pipe
    with closing_all(files_of(tmp_path, b"a\n", b"b\n")) as files:
        assert not started(files).is_live
        assert started([files[0], file]).is_live
        assert started([file]).is_live


# Files


def test_files_are_numbered_through(started, tmp_path):
    """Several inputs are one, and the numbers go on.

    A last line without an end is a line of its own; each file may have a byte-order mark.
    """
    contents = [b"a\nb", b"", b"\xef\xbb\xbfc\r\n\n", b"\n", b"d"]
    with closing_all(files_of(tmp_path, *contents)) as files:
        pieces = all_pieces(started(files))
    texts = ["a", "b", "c", "", "", "d"]
    assert pieces == [Piece(text, i, 1, True) for i, text in enumerate(texts, 1)]


def test_a_pipe_after_a_file(pipe, started, tmp_path):
    """Files and pipes may be mixed, and keep their order."""
    file, writer = pipe
    writer.write(b"live\n")
    writer.close()
    with closing_all(files_of(tmp_path, b"first\n", b"last\n")) as files:
        pieces = all_pieces(started([files[0], file, files[1]]))
    assert [(p.line, p.text) for p in pieces] == [(1, "first"), (2, "live"), (3, "last")]


def test_a_large_file_comes_whole(started, tmp_path):
    """Many reads, characters and line ends across their boundaries; the oracle is the text."""
    lines = [f"line {i} \u6211\u5f88\U0001f600" * (i % 7) for i in range(9000)]
    data = "\r\n".join(lines).encode() + b"\r\n"
    assert len(data) > 10 * READ_BYTES
    with closing_all(files_of(tmp_path, data)) as files:
        pieces = all_pieces(started(files))
    assert [p.text for p in pieces] == lines
    assert [p.line for p in pieces] == [*range(1, 9001)]


def test_long_lines_are_cut_where_the_caller_says(tmp_path):
    """`max_piece_chars` is the limit in every file, the first and the later ones."""
    with closing_all(files_of(tmp_path, b"x" * 25 + b"\n", b"y" * 25)) as files:
        pieces = all_pieces(Reader(files, max_piece_chars=10))
    assert [(p.line, p.part, p.text) for p in pieces] == [
        (line, part, char * size)
        for line, char in ((1, "x"), (2, "y"))
        for part, size in ((1, 10), (2, 10), (3, 5))
    ]


@pytest.mark.parametrize("contents", [[], [b""], [b"", b""], [b"\xef\xbb\xbf"]], ids=repr)
def test_no_input_has_an_end(started, tmp_path, contents):
    """Empty inputs, or none at all: no pieces, and the end."""
    with closing_all(files_of(tmp_path, *contents)) as files:
        reader = started(files)
        assert all_pieces(reader) == []
        assert reader.get(0) == []


def test_after_the_end_get_does_not_wait(started, tmp_path):
    """At the end, `get` returns at once, whatever its timeout."""
    with closing_all(files_of(tmp_path, b"a\n")) as files:
        reader = started(files)
        all_pieces(reader)
    begin = time.monotonic()
    assert reader.get(60) == []
    assert time.monotonic() - begin < 5


# Back-pressure


FULL_READS = MAX_WAITING_BYTES // READ_BYTES
"""Reads that wait when there is no more room."""


def test_a_fast_producer_is_held_back():
    """While nobody takes lines, reading stops after what may wait and one read more.

    Each list that is taken lets in one more read.
    """
    read = b"x" * (READ_BYTES - 1) + b"\n"
    with FakeFile(read for _ in range(10_000)) as file:
        reader = Reader([file])
        wait_until(lambda: file.num_reads == FULL_READS + 1)
        time.sleep(0.5)  # longer than a wait for room in the queue
        assert file.num_reads == FULL_READS + 1
        for num_taken in range(1, 4):
            assert len(next_pieces(reader)) == 4
            wait_until(lambda n=num_taken: file.num_reads == FULL_READS + 1 + n)
        time.sleep(0.3)
        assert file.num_reads == FULL_READS + 4
        assert file.largest_size == READ_BYTES
        reader.stop()


def test_the_writer_of_a_pipe_waits(pipe, started):
    """A writer that is faster than the model blocks: few bytes are taken from it, none is lost."""
    file, writer = pipe
    line = b"x" * 99 + b"\n"
    num_lines = 20_000
    written = 0

    def write():
        nonlocal written
        for _ in range(num_lines // 10):
            writer.write(line * 10)
            written += 10 * len(line)
        writer.close()

    thread = threading.Thread(target=write, daemon=True)
    reader = started([file])
    thread.start()
    last = -1
    while written != last:
        last = written
        time.sleep(0.3)
    # A pipe holds 64 KiB of its own on Linux, 16 to 64 on macOS.
    assert written <= (FULL_READS + 2) * READ_BYTES + (1 << 16) + 10 * len(line)
    assert thread.is_alive()
    assert len(all_pieces(reader)) == num_lines
    thread.join(PATIENCE)


# Stopping and failing


def test_stop_ends_it_at_once():
    """After `stop` nothing comes, not what was waiting either, and reading ends."""
    read = b"a\n" * (READ_BYTES // 2)
    with FakeFile(read for _ in range(10_000)) as file:
        before = set(threading.enumerate())
        reader = Reader([file])
        (thread,) = set(threading.enumerate()) - before
        wait_until(lambda: file.num_reads == FULL_READS + 1)
        reader.stop()
        assert reader.at_end
        assert reader.get(60) == []
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert file.num_reads <= FULL_READS + 2


def test_stop_while_nothing_comes(pipe, started):
    """A reader whose thread waits for a silent pipe can be stopped, and does not hold up Python."""
    file, writer = pipe
    before = set(threading.enumerate())
    reader = started([file])
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon
    reader.stop()
    assert reader.get(60) == []
    writer.write(b"too late\n")
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert reader.get(0) == []


def test_the_thread_ends_with_the_input(started, tmp_path):
    """At the end of the input the thread is gone."""
    before = set(threading.enumerate())
    with closing_all(files_of(tmp_path, b"a\n")) as files:
        all_pieces(started(files))
        wait_until(lambda: not set(threading.enumerate()) - before)


def test_a_read_error_is_an_input_error():
    """Lines before the error come first; then an InputError that says what the system said."""
    error = OSError(errno.EIO, "Input/output error")
    with FakeFile([b"one\ntwo\nthr", error, b"never\n"]) as file:
        reader = Reader([file])
        assert [p.text for p in next_pieces(reader)] == ["one", "two"]
        with pytest.raises(
            InputError, match=r"cannot read the input: .*Input/output error"
        ) as info:
            next_pieces(reader)
    assert info.value.__cause__ is error
    assert file.num_reads == 2


@pytest.mark.skipif(os.name == "nt", reason="a folder cannot be opened on Windows")
def test_a_folder_cannot_be_read(tmp_path):
    """Standard input that is a folder (`streamchat pipe < .`) is an InputError, not the end."""
    descriptor = os.open(tmp_path, os.O_RDONLY)

    class Folder:
        def fileno(self):
            return descriptor

        def read(self, size):
            return os.read(descriptor, size)

    try:
        with pytest.raises(InputError, match="directory"):
            next_pieces(Reader([Folder()]))
    finally:
        os.close(descriptor)


@pytest.mark.skipif(os.name == "nt", reason="pipes always block on Windows")
def test_a_pipe_that_does_not_block_does_not_end_early(pipe, started):
    """Standard input may be non-blocking (shared with Node or ssh): a pause is not the end."""
    file, writer = pipe
    os.set_blocking(file.fileno(), False)
    writer.write(b"one\n")
    reader = started([file])
    assert [p.text for p in next_pieces(reader)] == ["one"]
    reader.get(0.2)
    writer.write(b"two\n")
    assert [p.text for p in next_pieces(reader, patience=2)] == ["two"]


def test_whatever_ends_the_thread_ends_the_reader():
    """Any failure of a read (ValueError: a closed file) is an error, not silence."""
    with FakeFile([b"one\n", ValueError("read of closed file")]) as file:
        reader = Reader([file])
        assert [p.text for p in next_pieces(reader)] == ["one"]
        with pytest.raises(InputError, match="cannot read the input: read of closed file"):
            next_pieces(reader, patience=1)


# Lag


def test_the_lag_is_how_long_the_oldest_line_has_waited(pipe, started):
    """It grows while nobody takes lines, and is nothing once all are taken."""
    file, writer = pipe
    reader = started([file])
    assert reader.lag_seconds == 0
    writer.write(b"one\n")
    wait_until(lambda: reader.lag_seconds > 0)
    time.sleep(0.3)
    writer.write(b"two\n")
    assert 0.3 <= reader.lag_seconds < PATIENCE
    assert reader.idle_seconds == 0
    first_arrival = time.monotonic() - reader.lag_seconds
    assert [piece.text for piece in next_pieces(reader)] == ["one"]
    assert reader.arrived == pytest.approx(first_arrival, abs=0.05)
    wait_until(lambda: reader.lag_seconds > 0)
    assert reader.lag_seconds < 0.3 + PATIENCE
    assert [piece.text for piece in next_pieces(reader)] == ["two"]
    assert reader.lag_seconds == 0
    writer.close()


def test_a_file_never_lags(started, tmp_path):
    """It waits for us, not we for it: there is nothing to catch up with."""
    with closing_all(files_of(tmp_path, b"a\n")) as files:
        reader = started(files, max_lag=0.01)
        time.sleep(0.2)
        assert reader.lag_seconds == 0
        assert [piece.text for piece in all_pieces(reader)] == ["a"]
    assert reader.take_dropped() == []


def test_what_waits_too_long_is_dropped_together_and_said(pipe, started):
    """All that waits goes at once, its lines are named, and what comes later is read."""
    file, writer = pipe
    reader = started([file], max_lag=0.2)
    for number in range(1, 4):
        writer.write(b"line %d\n" % number)
        wait_until(lambda: reader.lag_seconds > 0)
    time.sleep(0.4)
    assert reader.get(0) == []
    (dropped,) = reader.take_dropped()
    assert (dropped.first_line, dropped.last_line) == (1, 3)
    assert dropped.lag_seconds >= 0.4
    assert reader.take_dropped() == []
    writer.write(b"line 4\n")
    assert [piece.line for piece in next_pieces(reader)] == [4]
    writer.close()
    assert all_pieces(reader) == []


def test_an_input_that_ended_among_what_is_dropped_has_ended(pipe, started):
    """The end is not lost with the lines before it."""
    file, writer = pipe
    reader = started([file], max_lag=0.2)
    writer.write(b"one\n")
    writer.close()
    time.sleep(0.5)
    assert all_pieces(reader) == []
    assert reader.at_end
    assert [(d.first_line, d.last_line) for d in reader.take_dropped()] == [(1, 1)]
