"""From bytes to the pieces that the model is fed, in any format, live and from files.

The oracles: the line splitter, whose pieces plain text keeps, and the whole input read at once.
"""

import errno
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cli import programs, wait_until  # noqa: F401 - a fixture
from test_lines import DATA, FAMILY
from test_notes import live_reader
from test_reader import FakeFile, next_pieces

from streamchat.errors import InputError
from streamchat.events import UNKNOWN, Origin
from streamchat.pipe.formats.detect import PLAIN
from streamchat.pipe.formats.table import AUTO, FORMATS
from streamchat.pipe.lines import MAX_PIECE_CHARS, LineSplitter, Piece
from streamchat.pipe.parser import MAX_BLANK_LINES, MAX_LINE_CHARS, Parser
from streamchat.pipe.reader import MAX_WAITING_BYTES, PAUSE_SECONDS, Reader

SRT = "".join(f"{i}\n00:00:0{i},000 --> 00:00:0{i},900\ncue {i}\ngoes on\n\n" for i in range(1, 6))
SRT_TEXTS = [f"cue {i} goes on" for i in range(1, 6)]


def parse(data, name=AUTO, *, reads=None, max_piece_chars=MAX_PIECE_CHARS, first_line=1, **options):
    """All pieces of an input; `reads` are the sizes of its reads."""
    data = data.encode() if isinstance(data, str) else data
    splitter = LineSplitter(first_line, max_piece_chars)
    parser = Parser(name, max_piece_chars=max_piece_chars, **options)
    pieces, begin = [], 0
    for size in reads or [len(data) or 1]:
        pieces += parser.push(splitter.push(data[begin : begin + size]))
        begin += size
    return pieces + parser.push([*splitter.push(data[begin:]), *splitter.close()]) + parser.flush()


def split(data, max_piece_chars=MAX_PIECE_CHARS):
    splitter = LineSplitter(1, max_piece_chars)
    return [*splitter.push(data), *splitter.close()]


def texts(pieces):
    return [piece.text for piece in pieces]


# Plain text


@given(DATA, st.sampled_from([AUTO, PLAIN]), st.integers(16, 40))
def test_plain_text_keeps_its_pieces(data, name, size):
    """To the character, with their lines and parts, known by name or found out."""
    expected = split(b"x" + data, size)
    got = parse(b"x" + data, name, max_piece_chars=size)
    assert [(p.text, p.line, p.part, p.ends_line, p.lead) for p in got] == [
        (p.text, p.line, p.part, p.ends_line, "") for p in expected
    ]


def test_plain_text_without_times_or_names_is_untouched():
    """The very pieces of the splitter: nothing is said about them."""
    pieces = split(b"one\ntwo\n")
    got = Parser(PLAIN).push(pieces)
    assert got == pieces
    assert all(piece.origin is UNKNOWN for piece in got)


def test_a_long_plain_line_has_one_origin():
    """The time and the name in front belong to each part of the line."""
    pieces = parse("[0:01:05] Ann: " + "word " * 30 + "\nnext\n", max_piece_chars=40)
    parts = [piece for piece in pieces if piece.line == 1]
    assert len(parts) > 3
    assert {part.origin for part in parts} == {Origin(start=65.0, speaker="Ann")}
    assert pieces[-1] == Piece("next", 2, 1, True)


# Other formats


@given(
    st.sampled_from(
        [SRT, "WEBVTT\n\n00:01.000 --> 00:02.000\n<v Ann>one\n\n", '{"start": 1, "text": "a"}\n']
    ),
    st.lists(st.integers(1, 30), min_size=1, max_size=40),
    st.sampled_from([MAX_PIECE_CHARS, 64]),
)
def test_read_boundaries_never_show(text, reads, size):
    """Any cut into reads, and any size of pieces, gives the cues of the input at once."""
    text = text.replace("one", f"caf\xe9 {FAMILY}")
    assert parse(text, reads=reads, max_piece_chars=size) == parse(text)


def test_a_cue_says_what_the_input_says():
    """Lines, times and the speaker; what marks a speaker is read to the model, but no text."""
    data = "WEBVTT\n\n00:01.000 --> 00:02.500\n<v Ann>one\ntwo\n\n00:03.000 --> 00:04.000\nBob: x\n"
    assert parse(data) == [
        Piece("one two", 4, 1, True, Origin(last_line=5, start=1, end=2.5, speaker="Ann"), "Ann: "),
        Piece("Bob: x", 8, 1, True, Origin(start=3, end=4, speaker="Bob")),
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_byte_order_mark_and_line_ends(end):
    """SP1: neither a mark nor a carriage return is in the way of a format."""
    data = b"\xef\xbb\xbf" + SRT.replace("\n", end).encode()
    assert texts(parse(data)) == SRT_TEXTS


def test_bad_bytes_and_nul_in_a_cue():
    """SP1: each bad byte becomes U+FFFD, NUL stays, in the text and in the signature's line."""
    data = b"WEBVTT \xff\n\n00:01.000 --> 00:02.000\ncaf\xc3\xa9 \xff\xfe \x00 ok\n"
    assert texts(parse(data)) == ["caf\xe9 \ufffd\ufffd \x00 ok"]


def test_files_name_themselves():
    """The number of the line in its file stands beside the one that is numbered through."""
    pieces = parse(SRT, first_line=101, file="b.srt")
    assert [(p.line, p.origin.file, p.origin.file_line) for p in pieces][:2] == [
        (103, "b.srt", 3),
        (108, "b.srt", 8),
    ]
    assert pieces[0].origin.last_line == 104
    (piece,) = parse("x\n", first_line=7, file="a.txt")
    assert piece == Piece("x", 7, 1, True, Origin(file="a.txt", file_line=1))


def test_the_text_of_a_long_cue_is_cut_like_a_line():
    """By the same rule, with the speaker in front of the first part only."""
    said = " ".join(f"w{i}" for i in range(100))
    pieces = parse(f"WEBVTT\n\n00:01.000 --> 00:02.000\n<v Ann>{said}\n", max_piece_chars=64)
    assert texts(pieces) == texts(split(said.encode(), 64))
    assert [piece.part for piece in pieces] == [*range(1, len(pieces) + 1)]
    assert [piece.ends_line for piece in pieces] == [*[False] * (len(pieces) - 1), True]
    assert [piece.lead for piece in pieces] == ["Ann: ", *[""] * (len(pieces) - 1)]
    assert len({piece.origin for piece in pieces}) == 1


def test_a_message_is_read_whole_however_small_the_pieces():
    """A line of JSON is longer than a piece, also the first one, which decides the format."""
    text = "word " * 3000 + "end"
    data = json.dumps({"start": 0, "text": text, "words": ["x" * 100] * 100}) + "\n"
    pieces = parse(data * 2, max_piece_chars=64)
    assert "".join(texts(pieces)) == text * 2
    assert {piece.line for piece in pieces} == {1, 2}


@pytest.mark.parametrize("name", FORMATS)
def test_a_line_without_end_passes_as_text(name):
    """SP5: whatever the format, what is longer than any line of it comes as it is, in order."""
    # In SRT, a cue is still open when it comes.
    before, after = SRT.rstrip("\n") + "\n" if name == "srt" else "", "\nlast words\n"
    long = "word " * (MAX_LINE_CHARS // 5 + 2000)
    data = f"{before}{long}{after}"
    splitter, parser, pieces, held = LineSplitter(), Parser(name), [], 0
    for begin in range(0, len(data), 1 << 14):
        pieces += parser.push(splitter.push(data[begin : begin + (1 << 14)].encode()))
        held = max(held, begin + (1 << 14) - sum(map(len, texts(pieces))))
    pieces += parser.push(splitter.close()) + parser.flush()
    said = " ".join("".join(p.text + "\n" * p.ends_line for p in pieces).split())
    expected = " ".join([*(SRT_TEXTS if before else ()), *long.split(), "last words"])
    assert said == expected
    assert held < MAX_LINE_CHARS + 2 * (1 << 14) + len(before)


# Finding out


def found(data, **options):
    """The formats that were found out, and the pieces."""
    names = []
    pieces = parse(data, on_format=names.append, **options)
    return names, pieces


def test_what_was_found_is_said_once():
    """By its name, before the first cue; nothing is said of a format that was asked for."""
    assert found(SRT)[0] == ["srt"]
    assert found("hello\nWEBVTT\n")[0] == ["plain"]
    assert found("", first_line=1)[0] == []
    assert found(SRT, name="srt")[0] == []


@pytest.mark.parametrize(
    "data", ["42", "42\n", "\n\n42\n", "42\n43\n", "\n", "{", '{"uid"', "1\n\n2"]
)
def test_what_waits_for_the_format_comes_in_the_end(data):
    """A first line that decides nothing is plain text if nothing else decides."""
    names, pieces = found(data)
    assert names == ["plain"]
    assert pieces == split(data.encode())


def test_blank_lines_do_not_wait_for_ever():
    """So many of them are plain text."""
    parser = Parser(AUTO)
    blank = [Piece("", i, 1, True) for i in range(1, MAX_BLANK_LINES + 2)]
    assert parser.push(blank[:-1]) == []
    assert parser.push(blank[-1:]) == blank


def test_a_pause_decides():
    """After a pause, what was held back is given: a number is text, blank lines decide nothing."""
    parser = Parser(AUTO)
    assert parser.pause() == []
    blank, number = Piece("", 1, 1, True), Piece("42", 2, 1, True)
    assert parser.push([blank]) == []
    assert parser.pause() == [blank]
    assert parser.push([number]) == []
    assert parser.pause() == [number]
    timing = Piece("00:00:01,000 --> 00:00:02,000", 3, 1, True)
    (piece,) = parser.push([timing])
    assert piece.text == timing.text


def test_blank_lines_before_a_pause_hide_no_format():
    """A program may break a line long before it prints its first words."""
    parser = Parser(AUTO)
    parser.push([Piece("", 1, 1, True)])
    parser.pause()
    (piece,) = parser.push([Piece("[00:00:01.000 --> 00:00:02.000]   one", 2, 1, True)])
    assert (piece.text, piece.origin.start) == ("one", 1.0)


def test_half_a_line_is_no_reason_to_decide():
    """A message that is still on its way is waited for."""
    parser = Parser(AUTO)
    assert parser.push([Piece('{"start": 1, ', 1, 1, False)]) == []
    assert parser.pause() == []
    (piece,) = parser.push([Piece('"text": "one"}', 1, 2, True)])
    assert piece.text == "one"


# Live


def test_a_live_cue_is_there_before_the_one_after_the_next():
    """While the writer has the pipe open: each cue before the first line of the next but one."""
    with live_reader(parsers=[Parser(AUTO)]) as (reader, write):
        blocks = SRT.split("\n\n")[:5]
        write(blocks[0] + "\n\n")
        for index, block in enumerate(blocks[1:]):
            write(block + "\n")
            assert texts(next_pieces(reader)) == [SRT_TEXTS[index]]
            write("\n")
        assert not reader.at_end
        write(None)
        assert texts(next_pieces(reader)) == SRT_TEXTS[4:]


def test_a_pause_of_a_live_input_completes_a_cue():
    """A cue whose blank line does not come is given after a pause, and not before."""
    with live_reader(parsers=[Parser("srt")]) as (reader, write):
        written = time.monotonic()
        write("1\n00:00:01,000 --> 00:00:02,000\none\n")
        assert texts(next_pieces(reader)) == ["one"]
        assert time.monotonic() - written >= PAUSE_SECONDS
        write("two\n\n")
        assert texts(next_pieces(reader)) == ["two"]
        write(None)
        assert next_pieces(reader) == []


class SlowFile:
    """A regular file, of which each read gives a few bytes, after a while."""

    def __init__(self, file):
        self._file = file

    def fileno(self):
        return self._file.fileno()

    def read(self, _size):
        time.sleep(0.02)
        return self._file.read(40)


def test_a_file_makes_no_pause(tmp_path, monkeypatch):
    """However slow the disk: from files the result is the same each time."""
    monkeypatch.setattr("streamchat.pipe.reader.PAUSE_SECONDS", 0.0)
    (tmp_path / "input").write_text(SRT, encoding="utf-8")
    pieces = []
    with (tmp_path / "input").open("rb", buffering=0) as file:
        reader = Reader([SlowFile(file)], parsers=[Parser(AUTO)])
        while not reader.at_end:
            pieces += reader.get(0.001)
    assert texts(pieces) == SRT_TEXTS


def test_what_waits_comes_before_an_error():
    """A read error ends the input: the open cue first, and then the error."""
    error = OSError(errno.EIO, "Input/output error")
    with FakeFile([b"1\n00:00:01,000 --> 00:00:02,000\none\n", error]) as file:
        reader = Reader([file], parsers=[Parser(AUTO)])
        assert texts(next_pieces(reader)) == ["one"]
        for _ in range(2):
            with pytest.raises(InputError, match="cannot read the input"):
                next_pieces(reader)


def test_each_file_has_its_own_format(tmp_path):
    """Files of different formats, one after another; an open cue ends with its file."""
    contents = [
        "1\n00:00:01,000 --> 00:00:02,000\none",
        "plain\n",
        "WEBVTT\n\n00:01.000 --> 00:02.000\ntwo",
    ]
    opened = []
    for name, content in zip("abc", contents, strict=True):
        (tmp_path / name).write_text(content, encoding="utf-8")
        opened.append((tmp_path / name).open("rb", buffering=0))
    reader = Reader(opened, parsers=[Parser(AUTO, file=name) for name in "abc"])
    pieces = []
    while not reader.at_end:
        pieces += reader.get(1)
    for file in opened:
        file.close()
    assert [(p.text, p.line, p.origin.file, p.origin.file_line) for p in pieces] == [
        ("one", 3, "a", 3),
        ("plain", 4, "b", 1),
        ("two", 8, "c", 4),
    ]


def test_reads_that_say_nothing_do_not_keep_the_caller():
    """`get(0)` comes back after one read, so that Ctrl-C is seen, however fast the producer."""
    partial = json.dumps({"start": 0, "text": "x", "is_final": False}).encode() + b"\n"
    with FakeFile(partial for _ in range(10_000)) as file:
        reader = Reader([file], parsers=[Parser("jsonl")])
        full = -(-MAX_WAITING_BYTES // len(partial))
        for num_taken in range(3):
            wait_until(lambda n=num_taken: file.num_reads == full + 1 + n)
            assert reader.get(0) == []
        wait_until(lambda: file.num_reads == full + 4)
        time.sleep(0.3)
        assert file.num_reads == full + 4
        reader.stop()


# The command


@pytest.fixture
def pipe(command, tiny_folder):
    """`streamchat pipe` with the tiny model; gives what is written, as text."""

    def call(*args, stdin=b"", mode="score"):
        model = ["-m", tiny_folder, "--device", "cpu", "--max-new", "4"]
        return command("pipe", "--mode", mode, *model, *args, stdin=stdin)

    return call


def events_of(done, kind):
    assert done.code == 0, done.err
    return [e for e in map(json.loads, done.out.splitlines()) if e["event"] == kind]


VTT = b"WEBVTT\n\n00:01.000 --> 00:02.500\n<v Ann>one\ntwo\n\n1:00:03.000 --> 1:00:04.000\nthree\n"


def test_scores_and_replies_carry_times_and_speakers(pipe):
    """JSON: start, end, speaker, and the lines of the words; a plain line has none of these."""
    for mode, kind in (("score", "score"), ("reply", "reply")):
        first, second = events_of(pipe("--json", stdin=VTT, mode=mode), kind)
        known = {"line": 4, "last_line": 5, "start": 1.0, "end": 2.5, "speaker": "Ann"}
        assert known.items() <= first.items()
        assert first["text" if mode == "score" else "question"] == "one two"
        assert (second["line"], second["start"], second["end"]) == (8, 3603.0, 3604.0)
        assert not {"last_line", "speaker", "file"} & set(second)
        (plain,) = events_of(pipe("--json", stdin=b"hello\n", mode=mode), kind)
        assert not {"start", "end", "speaker", "last_line", "file", "file_line"} & set(plain)


def test_the_model_reads_who_speaks(pipe):
    """The name in front counts among the tokens; the text has none of it."""
    named, plain = (
        events_of(pipe("--json", stdin=data), "score")[0]
        for data in (VTT, VTT.replace(b"<v Ann>", b""))
    )
    assert named["text"] == plain["text"]
    assert named["num_tokens"] == plain["num_tokens"] + len("Ann: ")


def test_notes_cite_times_files_and_speakers(pipe, tmp_path):
    """In text after the lines they cover, in JSON as fields."""
    (tmp_path / "a.vtt").write_bytes(VTT)
    (tmp_path / "b.txt").write_text("[1:00:05] Bob: four\n", encoding="utf-8")
    names = [tmp_path / "a.vtt", tmp_path / "b.txt"]
    (note,) = events_of(pipe("--json", *names, mode="notes"), "note")
    assert (note["first_line"], note["last_line"]) == (4, 9)
    assert (note["start"], note["end"]) == (1.0, 3605.0)
    assert note["speakers"] == ["Ann", "Bob"]
    assert note["files"] == [str(name) for name in names]
    cited = f"[lines 4 to 9, {names[0]} to {names[1]}, 0:00:01 to 1:00:05]"
    assert pipe(*names, mode="notes").out.splitlines()[0] == cited
    one = pipe(names[0], mode="notes")
    assert one.out.splitlines()[0] == "[lines 4 to 8, 0:00:01 to 1:00:04]"
    (note,) = events_of(pipe("--json", stdin=b"hello\n", mode="notes"), "note")
    assert not {"start", "end", "speakers", "files"} & set(note)
    assert pipe(stdin=b"hello\n", mode="notes").out.splitlines()[0] == "[line 1]"


def test_the_format_is_said(pipe, tmp_path):
    """On standard error, for each file; not plain text, not what was asked for, not with -q."""
    assert "streamchat: input webvtt (auto)\n" in pipe(stdin=VTT).err
    assert "(auto)" not in pipe(stdin=b"hello\n").err
    assert "(auto)" not in pipe("--format", "webvtt", stdin=VTT).err
    assert pipe("-q", stdin=VTT).err == ""
    (tmp_path / "a.vtt").write_bytes(VTT)
    (tmp_path / "b").write_text("x\n", encoding="utf-8")
    err = pipe(tmp_path / "a.vtt", tmp_path / "b").err
    assert f"streamchat: {tmp_path / 'a.vtt'}: input webvtt (auto)\n" in err
    assert err.count("(auto)") == 1


def test_an_unknown_format_is_a_usage_error(pipe):
    """It ends with 2 and the names that there are; these are those of the table."""
    done = pipe("--format", "ass")
    assert done.code == 2
    for name in (AUTO, *FORMATS):
        assert f"'{name}'" in done.err


def test_cues_come_through_the_command_while_the_input_goes_on(
    programs,  # noqa: F811 - the fixture
    tiny_folder,
):
    """SP6: the event of each cue is out, into a pipe, before the one after the next begins."""
    process = programs.start(
        *["pipe", "--mode", "score", "--json", "-q"],
        *["-m", tiny_folder, "--device", "cpu"],
        bufsize=0,
    )
    lines = programs.read_lines(process.stdout)
    blocks = SRT.split("\n\n")[:5]
    process.stdin.write(f"{blocks[0]}\n\n".encode())
    for index, block in enumerate(blocks[1:], start=1):
        process.stdin.write(f"{block}\n".encode())
        wait_until(lambda n=index: len(lines) > n)
        event = json.loads(lines[index][1])
        assert (event["text"], event["start"]) == (SRT_TEXTS[index - 1], float(index))
        process.stdin.write(b"\n")
    process.stdin.close()
    assert process.wait(30) == 0
    programs.join()
    assert [json.loads(line)["event"] for _, line in lines] == ["start", *["score"] * 5, "end"]
