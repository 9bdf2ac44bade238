"""Scoring lines as they come: the same numbers as all at once, before the end of the input."""

import contextlib
import itertools
import math
import os
import random
import threading
import time
from dataclasses import replace

import pytest
import torch
from conftest import byte_tokenizer
from tokenizers import processors

from streamchat import CacheConfig, Stream
from streamchat.errors import InputError
from streamchat.events import LineScored, Progress
from streamchat.model.tokenizer import Tokenizer
from streamchat.pipe.lines import MAX_PIECE_CHARS
from streamchat.pipe.reader import Reader
from streamchat.pipe.score import POLL_SECONDS, batches, score

CONFIG = CacheConfig(sink_size=4, window_size=28)
ROOMY = CacheConfig(sink_size=4, window_size=2000)
PATIENCE = 10.0
NATS_PER_TOKEN_TOLERANCE = 1e-4
"""Nats. Scores are about 7 a token; one wrong position moves one by 0.1 or more."""

TEXT = "".join(f"line {i}{' and on' * (i % 5)}\n" for i in range(40))


def never():
    return False


@contextlib.contextmanager
def file_reader(folder, data, wrap=lambda file: file):
    """A reader of one regular file."""
    path = folder / "input.txt"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    with path.open("rb", buffering=0) as file:
        reader = Reader([wrap(file)])
        yield reader
        reader.stop()
        # A read under way on a closed file would read from the next one that gets its number.
        for thread in threading.enumerate():
            if thread.name == "reader":
                thread.join(5)


@contextlib.contextmanager
def pipe_reader():
    """A reader of a pipe, and the end to write to."""
    read_end, write_end = os.pipe()
    # The writer is closed first: that ends a read that still waits.
    with os.fdopen(read_end, "rb", buffering=0) as file, os.fdopen(write_end, "wb", 0) as writer:
        reader = Reader([file])
        yield reader, writer
        reader.stop()


def events_of(stream, folder, data, **options):
    with file_reader(folder, data, **options) as reader:
        return list(score(stream, reader, never))


def lines_of(events):
    return [event for event in events if isinstance(event, LineScored)]


def last_progress(events):
    assert isinstance(events[-1], Progress)
    return events[-1]


def batch_progress(events):
    """What was said after each batch; what was said while nothing came is left out."""
    return [
        event
        for before, event in itertools.pairwise(events)
        if isinstance(before, LineScored) and isinstance(event, Progress)
    ]


def assert_close(got, expected, num_tokens):
    assert abs(got - expected) <= NATS_PER_TOKEN_TOLERANCE * max(1, num_tokens)


def losses_by_the_stock_model(loaded, ids):
    """The oracle: log-softmax in float64 over a stock forward pass; None for the first token."""
    with torch.no_grad():
        logits = loaded.model(torch.tensor([ids]), use_cache=False).logits[0].double()
    log_probs = logits.log_softmax(dim=-1)
    return [None, *(-float(log_probs[i, token]) for i, token in enumerate(ids[1:]))]


@contextlib.contextmanager
def counted_forwards(model):
    """How many tokens each forward pass of the model had."""
    sizes = []
    hook = model.register_forward_pre_hook(lambda _model, args: sizes.append(args[0].shape[1]))
    try:
        yield sizes
    finally:
        hook.remove()


def with_bos(loaded):
    """The tiny model with a tokenizer that adds BOS (id 1)."""
    inner = byte_tokenizer()
    inner.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    return replace(loaded, tokenizer=Tokenizer(inner))


# The numbers


@pytest.mark.parametrize("chunk_size", [1, 16, 256])
def test_scores_are_those_of_the_stock_model(loaded, tmp_path, chunk_size):
    """Before any eviction, the oracle is one stock forward pass over the whole text."""
    stream = Stream(loaded, ROOMY, chunk_size=chunk_size)
    scored = lines_of(events_of(stream, tmp_path, TEXT))
    losses = losses_by_the_stock_model(loaded, loaded.tokenizer.encode(TEXT))
    position = 0
    for event, line in zip(scored, TEXT.splitlines(), strict=True):
        own = losses[position : position + len(line) + 1]
        assert (event.text, event.position, event.num_tokens) == (line, position, len(line) + 1)
        assert event.num_scored == len([loss for loss in own if loss is not None])
        assert_close(event.nats, sum(loss or 0 for loss in own), event.num_tokens)
        position += event.num_tokens
    assert stream.position == position


def test_lines_that_wait_have_the_scores_of_one_by_one(loaded, tmp_path):
    """Fed together or each by itself, with evictions: the oracle is `Stream.score` of each line."""
    scored = lines_of(events_of(Stream(loaded, CONFIG), tmp_path, TEXT))
    stream = Stream(loaded, CONFIG)
    for event, line in zip(scored, TEXT.splitlines(), strict=True):
        losses = stream.score(loaded.tokenizer.encode(line + "\n"))
        nats = sum(loss for loss in losses if loss is not None)
        assert event.text == line
        assert_close(event.nats, nats, event.num_tokens)
    assert stream.cache.num_evicted > 100


def test_nats_per_token_is_the_mean_of_the_scored():
    """The first token of a stream has no score, and does not count; a line without any has none."""
    fields = {"line": 1, "part": 1, "ends_line": True, "text": "ab", "position": 0}
    assert LineScored(**fields, num_tokens=3, num_scored=2, nats=5.0).nats_per_token == 2.5
    assert LineScored(**fields, num_tokens=1, num_scored=0, nats=0.0).nats_per_token is None


def test_blank_lines_are_scored(loaded, tmp_path):
    """A blank line is one token, its line end; the first of a stream has no score."""
    scored = lines_of(events_of(Stream(loaded, CONFIG), tmp_path, "\n\n\r\na\n\n"))
    assert [(e.line, e.text, e.num_tokens) for e in scored] == [
        (1, "", 1),
        (2, "", 1),
        (3, "", 1),
        (4, "a", 2),
        (5, "", 1),
    ]
    assert [e.num_scored for e in scored] == [0, 1, 1, 2, 1]
    assert scored[0].nats_per_token is None
    assert all(math.isfinite(e.nats) and e.nats > 0 for e in scored[1:])


@pytest.mark.parametrize("data", [b"", b"\xef\xbb\xbf"], ids=["empty", "bom"])
def test_empty_input(loaded, tmp_path, data):
    """No line and no token; what is said while the end has not come is that there are none."""
    stream = Stream(loaded, CONFIG)
    events = events_of(stream, tmp_path, data)
    assert lines_of(events) == []
    for event in events:
        is_last = event is events[-1]
        assert event == Progress(stream.stats(), num_lines=0, busy_seconds=0.0, is_last=is_last)
        assert event.tokens_per_second == 0.0
    stats = stream.stats()
    assert (stats.num_tokens, stats.num_held, stats.num_pinned, stats.num_evicted) == (0, 0, 0, 0)


def test_a_long_line_in_parts_has_the_score_of_the_whole(loaded, tmp_path):
    """Nats and tokens of the parts add up to those of the line scored at once.

    Words and a run without spaces, several pieces each, with evictions.
    """
    line = " ".join(["word"] * 1500) + "x" * 5000
    events = events_of(Stream(loaded, CONFIG), tmp_path, "first\n" + line + "\nlast\n")
    first, *parts, last = lines_of(events)
    assert len(parts) > 3
    assert [(e.line, e.part) for e in parts] == [(2, part) for part in range(1, len(parts) + 1)]
    assert [e.ends_line for e in parts] == [False] * (len(parts) - 1) + [True]
    assert max(len(e.text) for e in parts) <= MAX_PIECE_CHARS + 1
    assert "".join(e.text for e in parts) == line
    assert (first.line, last.line) == (1, 3)

    stream = Stream(loaded, CONFIG)
    stream.feed(loaded.tokenizer.encode("first\n"))
    losses = stream.score(loaded.tokenizer.encode(line + "\n"))
    assert sum(e.num_tokens for e in parts) == len(losses)
    for event in parts:
        begin = event.position - 6
        own = losses[begin : begin + event.num_tokens]
        assert_close(event.nats, sum(own), event.num_tokens)


def test_bytes_that_are_no_text_are_scored(loaded, tmp_path):
    """BOM, CR LF, invalid bytes and NUL; every score is a number."""
    data = b"\xef\xbb\xbfWEBVTT\r\n\r\ncaf\xc3\xa9 \xff\xfe \x00 ok\r\n" + random.Random(
        0
    ).randbytes(3000)
    scored = lines_of(events_of(Stream(loaded, CONFIG), tmp_path, data))
    assert [e.text for e in scored[:3]] == ["WEBVTT", "", "caf\xe9 \ufffd\ufffd \x00 ok"]
    assert all(math.isfinite(e.nats) for e in scored)


# BOS


def test_bos_is_fed_once(loaded, tmp_path):
    """A tokenizer that adds BOS has it at position 0, and never again, on a second input neither.

    With it, the first line's first token has a score; without, it has none.
    """
    stream = Stream(with_bos(loaded), CONFIG)
    events = events_of(stream, tmp_path, "ab\ncd\n")
    again = events_of(stream, tmp_path, "ef\n")
    assert list(stream.recent_ids) == [1, *loaded.tokenizer.encode("ab\ncd\nef\n")]
    assert [e.position for e in lines_of(events) + lines_of(again)] == [1, 4, 7]
    assert [e.num_scored for e in lines_of(events)] == [3, 3]
    assert last_progress(again).stats.num_tokens == 10

    stream = Stream(loaded, CONFIG)
    events = events_of(stream, tmp_path, "ab\ncd\n")
    assert list(stream.recent_ids) == loaded.tokenizer.encode("ab\ncd\n")
    assert [e.num_scored for e in lines_of(events)] == [2, 3]


def test_a_stream_goes_on_where_it_stands(loaded, tmp_path):
    """A stream that was fed already gets no BOS, and its next line's first token has a score."""
    loaded = with_bos(loaded)
    stream = Stream(loaded, CONFIG)
    stream.feed(loaded.tokenizer.encode("before\n"))
    (event,) = lines_of(events_of(stream, tmp_path, "ab\n"))
    assert (event.position, event.num_scored) == (7, 3)
    assert 1 not in stream.recent_ids


# Batches


def test_waiting_lines_are_fed_in_one_chunk(loaded):
    """Lines that have arrived are one forward pass, whether they are many or one."""
    with pipe_reader() as (reader, writer), counted_forwards(loaded.model) as sizes:
        writer.write(b"one\ntwo\nthree\n\nfive\n")
        events = score(Stream(loaded, CONFIG), reader, never)
        for _ in range(5):
            assert isinstance(next_line(events), LineScored)
        assert sizes == [20]
        writer.write(b"six\n")
        assert next_line(events).text == "six"
        assert sizes == [20, 4]


def test_few_forward_passes_for_many_lines(loaded, tmp_path):
    """From a file, 40 lines take a few chunks, not a pass each; no chunk is above its size."""
    with counted_forwards(loaded.model) as sizes:
        events_of(Stream(loaded, CONFIG, chunk_size=200), tmp_path, TEXT)
    assert sum(sizes) == len(TEXT)
    assert max(sizes) <= 200
    # A batch is whole lines: it lacks less than the longest line.
    longest = max(map(len, TEXT.splitlines(keepends=True)))
    assert len(sizes) <= math.ceil(len(TEXT) / (200 - longest))


def test_batches_fill_their_chunks(loaded, tmp_path):
    """Lines that wait are fed in chunks that are nearly full: a pass has its price, however small.

    Passes of 100 tokens that are each followed by one of a few would cost twice as much.
    """
    text = "123456789\n12345678\n" * 60
    with counted_forwards(loaded.model) as sizes:
        events_of(Stream(loaded, CONFIG, chunk_size=100), tmp_path, text)
    assert sum(sizes) == len(text)
    assert min(sizes[:-1]) > 50


def test_a_piece_longer_than_a_chunk_is_a_batch_of_its_own(loaded, tmp_path):
    """No batch has more tokens than it may, unless it is one piece; none is lost."""
    text = "ab\ncd\n" + "x" * 50 + "\nef\n" + "y" * 19 + "\ngh\n"
    with file_reader(tmp_path, text) as reader:
        made = [b for b in batches(reader, loaded.tokenizer, 20, never) if b.pieces]
    assert [[piece.text for piece in batch.pieces] for batch in made] == [
        ["ab", "cd"],
        ["x" * 50],
        ["ef"],
        ["y" * 19],
        ["gh"],
    ]
    ids = [i for batch in made for piece_ids in batch.ids for i in piece_ids]
    assert ids == loaded.tokenizer.encode(text)


class SlowFile:
    """A file read a few bytes at a time, with two pauses that are longer than a poll."""

    def __init__(self, file):
        self._file = file
        self._num_reads = 0

    def fileno(self):
        return self._file.fileno()

    def read(self, size):
        self._num_reads += 1
        if self._num_reads in (20, 50):
            time.sleep(2.5 * POLL_SECONDS)
        return self._file.read(7)


def test_from_a_file_the_numbers_are_the_same_bits(loaded, tmp_path):
    """How fast a file can be read does not show: batches, and so all digits, depend on it only."""
    runs = []
    for wrap in (lambda file: file, lambda file: file, SlowFile):
        with counted_forwards(loaded.model) as sizes:
            events = events_of(Stream(loaded, CONFIG), tmp_path, TEXT, wrap=wrap)
        runs.append((lines_of(events), sizes))
    assert runs[0] == runs[1] == runs[2]
    assert len(runs[0][0]) == 40


# Live input


def next_line(events):
    """The next scored line of a live input; what is said meanwhile is passed over."""
    deadline = time.monotonic() + PATIENCE
    for event in events:
        if isinstance(event, LineScored):
            return event
        assert time.monotonic() < deadline, "no line came"
    return None


def test_each_line_is_scored_before_the_end_of_the_input(loaded):
    """The event of a line comes while the writer still has the pipe open."""
    with pipe_reader() as (reader, writer):
        events = score(Stream(loaded, CONFIG), reader, never)
        for number in (1, 2, 3):
            writer.write(f"line {number}\n".encode())
            event = next_line(events)
            assert (event.line, event.text) == (number, f"line {number}")
        writer.write(b"unfinished")
        assert all(isinstance(next(events), Progress) for _ in range(3))
        writer.close()
        assert next_line(events).text == "unfinished"
        assert next_line(events) is None


def test_a_line_does_not_wait_for_those_behind_it(loaded):
    """Lines that trickle in, faster than a poll, are scored as they come, not once a chunk is full.

    A chunk would be 51 of these lines.
    """
    num_written = 0

    def trickle(writer):
        nonlocal num_written
        with contextlib.suppress(OSError, ValueError):  # the test has seen enough
            while num_written < 60:
                writer.write(b"line\n")
                num_written += 1
                time.sleep(0.04)

    with pipe_reader() as (reader, writer):
        events = score(Stream(loaded, CONFIG), reader, never)
        thread = threading.Thread(target=trickle, args=(writer,))
        thread.start()
        assert next_line(events).line == 1
        assert num_written < 20
        num_written = 60
        thread.join()


def test_control_comes_back_while_nothing_does(loaded):
    """A silent input: the stream's standing is said several times a second, without any work."""
    with pipe_reader() as (reader, _writer), counted_forwards(loaded.model) as sizes:
        events = score(Stream(loaded, CONFIG), reader, never)
        begin = time.monotonic()
        said = [next(events) for _ in range(3)]
        waited = time.monotonic() - begin
    assert all(isinstance(event, Progress) for event in said)
    assert 0.2 < waited < 3
    assert sizes == []


class Broken:
    """A file with two lines, the second of which cannot be read."""

    def __init__(self, file):
        self.fileno = file.fileno
        self._reads = iter([b"one\n"])

    def read(self, size):
        for data in self._reads:
            return data
        raise OSError("gone")


@pytest.mark.parametrize("chunk_size", [1, 256])
def test_what_was_read_before_an_error_is_scored(loaded, tmp_path, chunk_size):
    """The lines before come first, then the InputError."""
    stream = Stream(loaded, CONFIG, chunk_size=chunk_size)
    with file_reader(tmp_path, "", wrap=Broken) as reader:
        events = score(stream, reader, never)
        assert next_line(events).text == "one"
        with pytest.raises(InputError, match="cannot read the input: gone"):
            next_line(events)


# Stopping


def test_asked_to_stop_before_anything(loaded, tmp_path):
    """Nothing is scored; only BOS, if any, has been fed."""
    stream = Stream(with_bos(loaded), CONFIG)
    with file_reader(tmp_path, TEXT) as reader:
        assert all(isinstance(event, Progress) for event in score(stream, reader, lambda: True))
    assert stream.position == 1


def test_stopping_ends_after_the_batch_in_hand(loaded, tmp_path):
    """Asked to stop while it works, it finishes what it has taken, says where it stands, and ends.

    That is the batch, and the line that did not fit into it.
    """
    stream = Stream(loaded, CONFIG, chunk_size=30)
    events, stop = [], threading.Event()
    with file_reader(tmp_path, TEXT) as reader:
        for event in score(stream, reader, stop.is_set):
            events.append(event)
            if isinstance(event, LineScored):
                stop.set()
    scored = lines_of(events)
    assert 0 < len(scored) < 40
    num_tokens = sum(e.num_tokens for e in scored)
    assert stream.position == num_tokens == last_progress(events).stats.num_tokens
    first, *rest = batch_progress(events)
    assert [p.num_lines for p in rest] in ([], [first.num_lines + 1])


def test_a_stopped_reader_ends_it(loaded):
    """`Reader.stop` ends scoring of an input that would never end."""
    with pipe_reader() as (reader, writer):
        events = score(Stream(loaded, CONFIG), reader, never)
        writer.write(b"one\n")
        assert next_line(events).text == "one"
        reader.stop()
        assert next_line(events) is None


# Where it stands


def test_stats_say_where_the_stream_stands(loaded, tmp_path):
    """After each batch: tokens, lines, what is held, pinned and evicted. The oracle is counting."""
    stream = Stream(loaded, CONFIG, chunk_size=25)
    num_tokens = num_lines = 0
    seconds = 0.0
    for event in events_of(stream, tmp_path, TEXT + "no end"):
        if isinstance(event, LineScored):
            num_tokens += event.num_tokens
            num_lines += event.ends_line
            continue
        stats = event.stats
        assert (stats.num_tokens, event.num_lines) == (num_tokens, num_lines)
        assert stats.num_held == min(num_tokens, 32)
        assert stats.cache_size == 32
        assert stats.num_pinned == min(num_tokens, 4)
        assert stats.num_evicted == max(0, num_tokens - 32)
        assert event.num_unnoted is None
        assert event.busy_seconds >= seconds
        seconds = event.busy_seconds
        assert (seconds > 0) == (num_tokens > 0)
        speed = num_tokens / seconds if seconds else 0.0
        assert event.tokens_per_second == pytest.approx(speed)
    assert (num_tokens, num_lines) == (len(TEXT) + len("no end\n"), 41)


def test_a_part_of_a_line_is_no_line_yet(loaded, tmp_path):
    """`num_lines` counts lines that have ended; parts of a long one are not among them."""
    events = events_of(Stream(loaded, CONFIG), tmp_path, "x" * (2 * MAX_PIECE_CHARS + 100))
    assert [event.num_lines for event in batch_progress(events)] == [0, 0, 1]


def test_waiting_is_not_work(loaded):
    """Time spent waiting for input is not in `busy_seconds`."""
    with pipe_reader() as (reader, writer):
        events = score(Stream(loaded, CONFIG), reader, never)
        begin = time.monotonic()
        for _ in range(4):
            next(events)
        writer.write(b"one\n")
        assert next_line(events).text == "one"
        progress = next(events)
        elapsed = time.monotonic() - begin
    assert 0 < progress.busy_seconds < elapsed - 0.3
