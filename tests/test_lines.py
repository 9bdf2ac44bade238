"""Bytes to lines: nothing depends on how they were read, and long lines are cut where it is safe.

The oracle for the text is Python's own decoding of all bytes at once.
"""

import gc
import itertools
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamchat.pipe.lines import MAX_PIECE_CHARS, LineSplitter, Piece

FAMILY = "\U0001f469\u200d\U0001f469\u200d\U0001f467"
BOM = b"\xef\xbb\xbf"

FRAGMENTS = st.sampled_from(
    [
        b"\n",
        b"\r",
        b"\r\n",
        b" ",
        b"  ",
        b"a",
        b"word ",
        b"longer-word ",
        b"\x00",
        BOM,
        BOM[:2],
        b"\xff",
        b"\xfe\xff",
        "\u6211".encode()[:2],
        b"\xed\xa0\x80",  # a surrogate
        "caf\xe9".encode(),
        "\u6211".encode(),
        "e\u0301".encode(),
        FAMILY.encode(),
        "\u2028\u2029\x85\x0b\x0c".encode(),
    ]
)
DATA = st.lists(FRAGMENTS | st.binary(max_size=4), max_size=40).map(b"".join)
SMALL = 16
"""Characters of a piece, where pieces should be many."""


def split(*reads, max_piece_chars=MAX_PIECE_CHARS):
    splitter = LineSplitter(max_piece_chars=max_piece_chars)
    return [p for data in reads for p in splitter.push(data)] + splitter.close()


def cut_reads(data, cuts):
    bounds = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(bounds)]


def decoded_lines(data):
    """The oracle: decode everything, then split; an end of line ends a line and begins none."""
    *complete, rest = data.decode("utf-8-sig", "replace").split("\n")
    return [line.removesuffix("\r") for line in ([*complete, rest] if rest else complete)]


def joined_lines(pieces):
    texts = {}
    for piece in pieces:
        texts[piece.line] = texts.get(piece.line, "") + piece.text
    return list(texts.values())


@given(DATA, st.lists(st.integers(0, 500), max_size=8))
def test_read_boundaries_never_show(data, cuts):
    """Any cut into reads gives the pieces of one single read, also with pieces of 16 characters."""
    for size in (MAX_PIECE_CHARS, SMALL):
        whole = split(data, max_piece_chars=size)
        assert split(*cut_reads(data, cuts), max_piece_chars=size) == whole


@given(DATA)
def test_byte_by_byte_is_the_same_as_at_once(data):
    """Reads of one byte each, the worst case for characters and CR LF, change nothing."""
    reads = (data[i : i + 1] for i in range(len(data)))
    assert split(*reads, max_piece_chars=SMALL) == split(data, max_piece_chars=SMALL)


@given(DATA)
def test_pieces_join_to_the_decoded_lines(data):
    """The oracle is `bytes.decode` of everything: no character lost, added or moved to a line."""
    for size in (MAX_PIECE_CHARS, SMALL):
        assert joined_lines(split(data, max_piece_chars=size)) == decoded_lines(data)


@pytest.mark.parametrize("data", [BOM[:1], BOM[:2]])
def test_an_input_that_is_half_a_bom_becomes_a_replacement_character(data):
    """What is not UTF-8 becomes U+FFFD, also where it could have become a BOM."""
    assert joined_lines(split(data)) == decoded_lines(data)


@given(DATA)
def test_lines_and_parts_are_numbered_without_a_gap(data):
    """Parts count from 1 in each line, only the last one ends it, and lines count on from it."""
    pieces = split(data, max_piece_chars=SMALL)
    line, part = 1, 1
    for piece in pieces:
        assert (piece.line, piece.part) == (line, part)
        line, part = (line + 1, 1) if piece.ends_line else (line, part + 1)
    assert part == 1


@given(DATA)
def test_no_piece_is_longer_than_the_limit_and_one(data):
    """16 characters and one; none is empty but for an empty line."""
    for piece in split(data, max_piece_chars=SMALL):
        assert len(piece.text) <= SMALL + 1
        assert piece.text or (piece.part == 1 and piece.ends_line)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"\n\n", ["", ""]),
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"a\nb", ["a", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"\r\n", [""]),
        (b"\r", [""]),
        (b"a\r", ["a"]),
        (b"a\rb\n", ["a\rb"]),
        (b"a\r\r\n", ["a\r"]),
        (BOM + b"a\n", ["a"]),
        (BOM, []),
        (BOM + BOM + b"a", ["\ufeffa"]),
        (b"a\n" + BOM + b"b", ["a", "\ufeffb"]),
        (b"a\x00b\n\x00\n", ["a\x00b", "\x00"]),
        ("a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\n".encode(), ["a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"]),
        (b"caf\xc3\xa9 \xff\xfe ok\r\n", ["caf\xe9 \ufffd\ufffd ok"]),
        (b"\xe6\x88\n\x91", ["\ufffd", "\ufffd"]),
        (b"end \xf0\x9f\x98", ["end \ufffd"]),
    ],
    ids=repr,
)
def test_examples(data, expected):
    """Written out by hand: BOM, CR LF, NUL, invalid bytes, and what does not end a line."""
    assert split(data) == [Piece(text, i, 1, True) for i, text in enumerate(expected, 1)]
    assert split(*(data[i : i + 1] for i in range(len(data)))) == split(data)


def test_a_line_is_there_as_soon_as_its_end_is():
    """A push returns the lines that it completes, and keeps back the unfinished one."""
    splitter = LineSplitter()
    assert splitter.push(b"one\ntw") == [Piece("one", 1, 1, True)]
    assert splitter.push(b"") == []
    assert splitter.push(b"o\r") == []
    assert splitter.push(b"\nthree") == [Piece("two", 2, 1, True)]
    assert splitter.close() == [Piece("three", 3, 1, True)]


def test_numbering_goes_on_from_the_first_line():
    """A splitter starts at `first_line`, and says where the next one should start."""
    splitter = LineSplitter(first_line=7)
    pieces = [*splitter.push(b"a\nb"), *splitter.close()]
    assert [p.line for p in pieces] == [7, 8]
    assert splitter.next_line == 9
    assert LineSplitter(first_line=9).close() == []


# The cut rule


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"], ids=["none", "lf", "crlf"])
def test_a_line_of_the_limit_is_one_piece(end):
    """A line of 4,096 characters is whole, whatever ends it: the CR of its end makes no piece."""
    text = "a" * MAX_PIECE_CHARS
    assert split(text.encode() + end) == [Piece(text, 1, 1, True)]


def test_words_stay_whole():
    """The words of the pieces are the words of the line, and each later piece begins with a space.

    It would miss a cut rule that is not the documented one but keeps words; see the next test.
    """
    words = [f"w{i * i}" for i in range(3000)]
    pieces = split(" ".join(words).encode())
    assert len(pieces) > 4
    assert [word for piece in pieces for word in piece.text.split()] == words
    for before, after in itertools.pairwise(pieces):
        assert not before.text.endswith(" ")
        assert after.text.startswith(" ")


@pytest.mark.parametrize(
    ("line", "first"),
    [
        ("a" * 2500 + " " + "b" * 1000 + " " + "c" * 2000, 3501),  # the last of two
        ("a" * 2048 + " " + "b" * 6000, MAX_PIECE_CHARS),  # just in the first half
        ("a" * 2049 + " " + "b" * 6000, 2049),  # just in the second
        ("a" * 4095 + " " + "b" * 6000, 4095),  # the last place of a piece
        ("a" * 4096 + " " + "b" * 6000, MAX_PIECE_CHARS),
        ("a" * 2500 + " b  c" + "d" * 6000, 2500),  # a pair of spaces is no place to cut
        ("a" * 2500 + " b\t c" + "d" * 6000, 2500),
        ("a" * 2500 + " b \tc" + "d" * 6000, 2500),
        ("a  " * 3000, MAX_PIECE_CHARS),
        (" " * 9000, MAX_PIECE_CHARS),
        ("a" * 9000, MAX_PIECE_CHARS),
    ],
    ids=range(11),
)
def test_where_the_first_cut_falls(line, first):
    """The documented rule: before the last lone space of the second half, else at the limit."""
    pieces = split(line.encode())
    assert len(pieces[0].text) == first
    assert "".join(p.text for p in pieces) == line


CLUSTERS = {
    "family": FAMILY,
    "skin tone": "\U0001f44d\U0001f3fd",
    "family with skin tones": "\U0001f468\U0001f3fb\u200d\U0001f91d\u200d\U0001f468\U0001f3ff",
    "variation selector": "\u2764\ufe0f\u200d\U0001f525",
    "combining": "e\u0301\u0323\u0308",
    "hebrew points": "\u05e9\u05c1\u05b8",
    "keycap": "1\ufe0f\u20e3",
    "thai vowel": "\u0e01\u0e31\u0e49",
    "devanagari vowel": "\u0915\u093f",
}


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
def test_no_cut_inside_a_cluster(cluster):
    """Wherever the limit falls in a base character and its marks or joiners, they stay together."""
    for offset in range(len(cluster) + 1):
        start = MAX_PIECE_CHARS - offset
        text = "x" * start + cluster + "y" * 100
        pieces = split(text.encode())
        assert not start < len(pieces[0].text) < start + len(cluster)
        assert "".join(p.text for p in pieces) == text


def test_a_cluster_without_end_is_cut_all_the_same():
    """5,000 marks on one letter are no text; they come in pieces like everything else."""
    text = "e" + "\u0301" * 20_000
    pieces = split(text.encode())
    assert "".join(p.text for p in pieces) == text
    assert max(len(p.text) for p in pieces) <= MAX_PIECE_CHARS + 1


# Cost


@pytest.mark.parametrize(
    ("unit", "size"),
    [
        (b"a", 5_000_000),
        (b" ", 500_000),
        ("\u0301".encode(), 2_000_000),
        (b"\xff", 2_000_000),
        (b'{"k": [1, 2]}, ', 2_000_000),
    ],
    ids=["a", "space", "mark", "ff", "json"],
)
def test_memory_does_not_grow_with_the_line(unit, size):
    """Megabytes without a line end; what is held back stays below a piece and a character.

    Counted from outside (characters given in, less those given out), and by the allocator.
    """
    read = unit * (16_384 // len(unit))
    chars = len(read.decode("utf-8", "replace"))
    splitter = LineSplitter()
    held = 0
    tracemalloc.start()
    try:
        for _ in range(size // len(read)):
            held += chars - sum(len(p.text) for p in splitter.push(read))
            assert held <= MAX_PIECE_CHARS + 1
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("read_size", [64, 1 << 14, 1 << 22], ids=["small", "usual", "at-once"])
@pytest.mark.parametrize(
    ("unit", "size"),
    [
        (b"a", 800_000),
        (b" ", 40_000),
        ("\u0301".encode(), 400_000),
        (b"\n", 40_000),
        (b"\xff", 400_000),
    ],
    ids=["a", "space", "mark", "lf", "ff"],
)
def test_time_is_linear(unit, size, read_size):
    """Four times the bytes take about four times as long; quadratic work would take sixteen."""

    def seconds(size):
        data = unit * (size // len(unit))
        started = time.thread_time()
        splitter = LineSplitter()
        for begin in range(0, len(data), read_size):
            splitter.push(data[begin : begin + read_size])
        splitter.close()
        return time.thread_time() - started

    gc.disable()  # a collection visits all of pytest's objects
    try:
        small = min(seconds(size) for _ in range(3))
        large = min(seconds(4 * size) for _ in range(3))
    finally:
        gc.enable()
    assert large < 9 * small + 0.005


@settings(max_examples=20)
@given(st.text(alphabet=st.characters(exclude_characters="\n\r"), max_size=200), st.integers(1, 40))
def test_long_lines_of_any_text_come_back_whole(text, repeats):
    """At the true limit: any text repeated past it joins to itself, in pieces that are bounded."""
    line = text * repeats
    data = line.encode("utf-8", "surrogatepass") + b"\n"
    pieces = split(data)
    assert joined_lines(pieces) == decoded_lines(data)
    assert max(len(p.text) for p in pieces) <= MAX_PIECE_CHARS + 1
