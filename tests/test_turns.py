"""Lines put together to units. The oracle: groupings of the whole input, written out by hand."""

import os
import threading
import time

import pytest
from test_notes import live_reader, reader_of

from streamchat.errors import InputError
from streamchat.pipe import turns as turns_module
from streamchat.pipe.parser import Parser
from streamchat.pipe.place import Place
from streamchat.pipe.reader import Reader
from streamchat.pipe.turns import units

SPEAKERS = """Ann: one
Ann: two
and more
Bob: three
Ann: four

five
"""

CUES = """WEBVTT

00:01.000 --> 00:02.000
<v Ann>one

00:02.500 --> 00:03.000
<v Bob>two

00:03.100 --> 00:04.000
<v Bob>three

00:06.000 --> 00:07.000
<v Bob>four
"""


def never():
    return False


def texts(reader, should_stop=never, place=None, **options):
    found = units(reader, should_stop, place, **options)
    return [unit.text for unit in found if unit is not None]


def parsed(data, tmp_path, **options):
    """Units of a file in any format."""
    with reader_of(data, tmp_path, parsers=[Parser("auto")]) as reader:
        return [unit for unit in units(reader, never, **options) if unit is not None]


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("line", ["Ann: one", "Ann: two", "and more", "Bob: three", "Ann: four", "", "five"]),
        ("turn", ["Ann: one\nAnn: two\nand more", "Bob: three", "Ann: four\n\nfive"]),
        ("paragraph", ["Ann: one\nAnn: two\nand more\nBob: three\nAnn: four", "five"]),
    ],
)
def test_lines_of_a_text_by_unit(tmp_path, unit, expected):
    """Turns end where another speaker is named, paragraphs at blank lines."""
    found = parsed(SPEAKERS, tmp_path, unit=unit)
    assert [piece.text for piece in found] == expected
    assert [piece.line for piece in found] == {
        "line": [1, 2, 3, 4, 5, 6, 7],
        "turn": [1, 4, 5],
        "paragraph": [1, 7],
    }[unit]


def test_turns_of_captions_have_their_times_and_speaker(tmp_path):
    """A turn begins with its first cue and ends with its last; who speaks is said once."""
    ann, bob = parsed(CUES, tmp_path, unit="turn")
    assert (ann.lead, ann.text, ann.origin.start, ann.origin.end) == ("Ann: ", "one", 1, 2)
    assert (bob.lead, bob.text) == ("Bob: ", "two\nthree\nfour")
    assert (bob.origin.start, bob.origin.end, bob.origin.speaker) == (2.5, 7, "Bob")
    assert (bob.line, bob.origin.last_line) == (7, 13)


def test_marks_where_speakers_change_end_turns(tmp_path):
    """whisper.cpp's `[SPEAKER_TURN]` names nobody; what is not marked is one turn."""
    lines = ["Hello.[SPEAKER_TURN]", "Hello", "there. [SPEAKER_TURN]", "How are you?", "Well."]
    data = "".join(
        f"[00:00:{2 * n:02d}.000 --> 00:00:{2 * n + 2:02d}.000]   {line}\n"
        for n, line in enumerate(lines)
    )
    found = parsed(data, tmp_path, unit="turn")
    assert [piece.text for piece in found] == ["Hello.", "Hello\nthere.", "How are you?\nWell."]
    assert [piece.origin.turn for piece in found] == [1, 2, 3]
    (whole,) = parsed(data.replace("[SPEAKER_TURN]", ""), tmp_path, unit="turn")
    assert whole.origin.turn is None


def test_a_silence_ends_a_paragraph_of_captions(tmp_path):
    """Two seconds between cues; a speaker is named in the text where another one begins."""
    first, second = parsed(CUES, tmp_path, unit="paragraph")
    assert (first.lead, first.text) == ("Ann: ", "one\nBob: two\nthree")
    assert first.origin.speaker is None  # two speak in it
    assert (second.lead, second.text, second.origin.speaker) == ("Bob: ", "four", "Bob")


def test_a_unit_does_not_go_over_into_the_next_file(tmp_path):
    """Two files of one speaker are two turns."""
    (tmp_path / "a").write_text("Ann: one\n")
    (tmp_path / "b").write_text("Ann: two\n")
    with (tmp_path / "a").open("rb", 0) as a, (tmp_path / "b").open("rb", 0) as b:
        reader = Reader([a, b], parsers=[Parser("plain", file="a"), Parser("plain", file="b")])
        assert texts(reader, unit="turn") == ["Ann: one", "Ann: two"]


@pytest.mark.parametrize("unit", ["turn", "paragraph"])
def test_a_live_unit_is_complete_after_a_silence(unit):
    """What waits is given when nothing has come for so long, and not before."""
    with live_reader(parsers=[Parser("plain")]) as (reader, write):
        found = units(reader, never, unit=unit, idle_seconds=0.5)
        write("Ann: one\nAnn: two\n")
        begin = time.monotonic()
        while (piece := next(found)) is None:
            assert time.monotonic() < begin + 20
        assert time.monotonic() - begin >= 0.5
        assert piece.text == "Ann: one\nAnn: two"
        write("Ann: three\n")
        write(None)
        assert [piece.text for piece in found if piece is not None] == ["Ann: three"]


@pytest.mark.parametrize("unit", ["line", "turn", "paragraph"])
def test_the_place_stands_behind_what_was_given(tmp_path, unit):
    """After each unit, `place` is where a reader that passes over as many pieces would go on."""
    with reader_of(SPEAKERS, tmp_path, parsers=[Parser("auto")]) as reader:
        place = Place()
        counts, lines = [], []
        for piece in units(reader, never, place, unit=unit):
            if piece is not None:
                counts.append(place.num_pieces)
                lines.append((place.num_lines, place.last_line))
    expected = {"line": [1, 2, 3, 4, 5, 6, 7], "turn": [3, 4, 7], "paragraph": [6, 7]}[unit]
    assert counts == expected
    assert lines == [(count, count) for count in expected]


def test_a_stop_leaves_the_unit_under_way_out(tmp_path):
    """It is not answered, and not counted: going on from a checkpoint begins with it."""
    with reader_of(SPEAKERS, tmp_path, parsers=[Parser("auto")]) as reader:
        place, stopped = Place(), []
        found = units(reader, lambda: bool(stopped), place, unit="turn")
        assert next(found).text.startswith("Ann: one")
        stopped.append(True)
        assert list(found) == []
    assert place.num_pieces == 3


@pytest.mark.parametrize("unit", ["turn", "paragraph"])
def test_a_unit_without_an_end_is_cut(tmp_path, monkeypatch, unit):
    """Memory is bounded: what is too long becomes several, and nothing is lost."""
    monkeypatch.setattr(turns_module, "MAX_TURN_CHARS", 50)
    lines = [f"line {n}" for n in range(40)]
    found = [piece.text for piece in parsed("\n".join(lines), tmp_path, unit=unit)]
    assert len(found) > 4
    assert max(map(len, found)) < 50 + len("line 39\n" * 8)
    assert "\n".join(found).split("\n") == lines


@pytest.mark.parametrize("is_replayed", [False, True])
def test_what_came_before_a_failure_is_given_first(is_replayed):
    """Unless it can be read again: then the unit is answered whole in the next run."""
    read_end, write_end = os.pipe()

    class Failing:
        """A pipe that fails after one line."""

        def __init__(self):
            self.reads = [b"Ann: one\n"]

        def fileno(self):
            return read_end

        def read(self, _size):
            if self.reads:
                return self.reads.pop()
            raise OSError("the disk is gone")

    try:
        given = []
        reader = Reader([Failing()], parsers=[Parser("plain")], is_replayed=is_replayed)
        found = units(reader, never, unit="turn")
        with pytest.raises(InputError, match="the disk is gone"):
            given.extend(iter(found.__next__, 0))
        assert [p.text for p in given if p is not None] == ([] if is_replayed else ["Ann: one"])
    finally:
        os.close(read_end)
        os.close(write_end)
        for thread in threading.enumerate():
            if thread.name == "reader":
                thread.join(5)
