"""The edge to the terminal, without a terminal: consoles on buffers, a clock that is set by hand.

What a real terminal makes of it is held in `test_terminal.py`.
"""

import csv
import io
import itertools
import json
import os
import sys
import unicodedata
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from streamchat.errors import OutputError
from streamchat.events import LineScored, Progress, StreamStats
from streamchat.ui import status
from streamchat.ui.console import (
    Messages,
    can_animate,
    can_draw,
    is_tty,
    make_console,
    set_plain,
    visible,
)
from streamchat.ui.lines import json_line, plain_line
from streamchat.ui.output import Output, ReaderGone
from streamchat.ui.status import StatusLine, plain_status, status_text
from streamchat.ui.tables import csv_text, json_lines, markdown_table, print_table

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
posix_only = pytest.mark.skipif(sys.platform == "win32", reason="pipes are POSIX here")

HOSTILE = "list[0] [red]x[/] [/INST] src/[id].tsx :smile: 42"


class FakeTerminal(io.StringIO):
    """A buffer that says it is a terminal."""

    def isatty(self):
        return True


def stats(**overrides):
    fields = {
        "num_held": 1024,
        "cache_size": 1024,
        "num_pinned": 4,
        "num_evicted": 1_234_567,
        "num_tokens": 1_235_591,
    }
    return StreamStats(**{**fields, **overrides})


def progress(**overrides):
    return Progress(stats(), **{"num_lines": 9_876, "busy_seconds": 1000.0, **overrides})


EXTRAS = ("1,236 tok/s", "lines 9,876", "^C stop")
EMPTY = stats(num_held=0, num_pinned=0, num_evicted=0, num_tokens=0)


def scored(**overrides):
    fields = {
        "line": 3,
        "part": 1,
        "ends_line": True,
        "text": "naïve\t我",
        "position": 17,
        "num_tokens": 4,
        "num_scored": 4,
        "nats": 5.0,
    }
    return LineScored(**{**fields, **overrides})


# Text


@given(st.text())
def test_visible_leaves_no_control_character_and_every_other_one_as_it_was(text):
    """No character that a terminal would obey survives, but for the tab; nothing else changes."""
    shown = visible(text)
    assert len(shown) == len(text)
    for before, after in zip(text, shown, strict=True):
        if unicodedata.category(before) == "Cc" and before != "\t":
            assert unicodedata.category(after) != "Cc"
        else:
            assert after == before


def test_visible_shows_which_control_character_it_was():
    """Escape, delete, newline and a C1 code become the symbols of Unicode for them."""
    assert visible("\x1b[2J\x7f\n\x9b\t") == "␛[2J␡␊\ufffd\t"


def test_a_plain_line_is_a_score_its_standard_score_and_the_text():
    """Nats per token, a tab, the standard score, a tab, the text; a dash where one is not known."""
    assert plain_line(scored()) == "1.250\t-\tnaïve\t我"
    assert plain_line(scored(z_score=-0.5)) == "1.250\t-0.50\tnaïve\t我"
    assert plain_line(scored(num_scored=0, nats=0.0)) == "-\t-\tnaïve\t我"


def test_a_json_line_has_the_documented_fields():
    """One object with the text as it is, and null for a score that does not exist."""
    assert json.loads(json_line(scored())) == {
        "event": "score",
        "line": 3,
        "part": 1,
        "ends_line": True,
        "text": "naïve\t我",
        "position": 17,
        "num_tokens": 4,
        "nats": 5.0,
        "nats_per_token": 1.25,
        "z_score": None,
    }
    assert "我" in json_line(scored())
    unscored = json.loads(json_line(scored(num_scored=0, nats=0.0)))
    assert unscored["nats"] is None
    assert unscored["nats_per_token"] is None


# Status


@pytest.mark.parametrize("example", [stats(), EMPTY, stats(num_held=1023)], ids=str)
def test_the_status_never_exceeds_the_width(example):
    """At every width from 0 to 200 the line fits, and a wider one never says less."""
    shown = [status_text(example, EXTRAS, width).plain for width in range(201)]
    assert all(cell_len(text) <= width for width, text in enumerate(shown))
    words = [[part.strip() for part in text.lstrip("█░ ").split("│")] for text in shown]
    # From 60 cells on a bar takes a part of the width.
    for narrow, wide in itertools.pairwise(words[1:60]):
        assert wide[: len(narrow)] == narrow or narrow == [""]
    for narrow, wide in itertools.pairwise(words[60:]):
        assert wide[: len(narrow)] == narrow
    assert words[200][-1] == "^C stop"


def test_the_status_says_how_full_what_left_and_how_fast():
    """At 80 columns: used/size, evicted, rate; the bar is full when and only when the cache is."""
    full = status_text(stats(), EXTRAS, 79).plain
    assert "1,024/1,024 │ evicted 1,234,567 │ 1,236 tok/s" in full
    assert full.startswith("█" * 20 + " ")
    nearly = status_text(stats(num_held=1023), EXTRAS, 79).plain
    assert nearly.startswith("█" * 19 + "░ 1,023/1,024")
    assert "░ 0/1,024" in status_text(EMPTY, EXTRAS, 79).plain


def test_the_plain_status_is_words_and_numbers():
    """Off a terminal the status is one line without symbols, for logs."""
    assert plain_status(progress()) == (
        "lines=9,876 in=1,235,591tok cache=1,024/1,024 pinned=4 evicted=1,234,567 1,236tok/s"
    )


@pytest.fixture
def clock(monkeypatch):
    """The time that a `StatusLine` sees, set by hand."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(status, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def status_on(monkeypatch, file, *, animated, quiet=False, width=80):
    messages = Messages(quiet=quiet)
    messages.console = Console(file=file, width=width, force_terminal=animated)
    monkeypatch.setattr(status, "can_animate", lambda: animated)
    return StatusLine(messages)


def test_off_a_terminal_the_status_is_a_line_every_ten_seconds(monkeypatch, clock):
    """Plain status lines come at intervals, not for each event, and hold no escape code."""
    file = io.StringIO()
    line = status_on(monkeypatch, file, animated=False)
    for second in range(100, 131):
        clock.seconds = float(second)
        for _ in range(5):
            line.update(progress(), beside_output=False)
    line.clear()
    assert file.getvalue().splitlines() == [f"streamchat: {plain_status(progress())}"] * 3
    assert "\x1b" not in file.getvalue()


def test_without_redrawing_the_interval_holds_beside_data_too(monkeypatch, clock):
    """Plain status lines come every ten seconds also where data goes to the same terminal."""
    file = io.StringIO()
    line = status_on(monkeypatch, file, animated=False)
    for second in range(100, 131):
        clock.seconds = float(second)
        line.clear()
        line.update(progress(), beside_output=True)
    assert len(file.getvalue().splitlines()) == 3


def test_on_a_terminal_the_status_is_redrawn_in_place_ten_times_a_second_at_most(
    monkeypatch, clock
):
    """A thousand updates in a second are at most eleven drawings, without a line feed."""
    file = FakeTerminal()
    line = status_on(monkeypatch, file, animated=True)
    for thousandth in range(1001):
        clock.seconds = 100 + thousandth / 1000
        line.update(progress(), beside_output=False)
    assert 5 <= file.getvalue().count("1,024/1,024") <= 11
    assert "\n" not in file.getvalue()


def test_beside_data_the_status_comes_back_after_each_line(monkeypatch, clock):
    """Where each data line clears the status away, it is redrawn at once, whatever the clock."""
    file = FakeTerminal()
    line = status_on(monkeypatch, file, animated=True)
    for _ in range(4):
        line.clear()
        line.update(progress(), beside_output=True)
    assert file.getvalue().count("1,024/1,024") == 4


def test_clearing_leaves_nothing_and_writes_only_where_something_stands(monkeypatch, clock):
    """`clear` erases the drawn line once; without one it writes nothing."""
    file = FakeTerminal()
    line = status_on(monkeypatch, file, animated=True)
    line.clear()
    assert file.getvalue() == ""
    line.update(progress(), beside_output=False)
    line.clear()
    length = len(file.getvalue())
    assert file.getvalue().endswith("\r\x1b[J")
    line.clear()
    assert len(file.getvalue()) == length


@pytest.mark.parametrize("width", [1, 2, 5, 40])
def test_a_narrow_terminal_is_never_filled_to_its_last_cell(monkeypatch, clock, width):
    """What is drawn is narrower than the terminal, which might wrap at its last cell."""
    file = FakeTerminal()
    status_on(monkeypatch, file, animated=True, width=width).update(progress(), beside_output=False)
    assert cell_len(file.getvalue()) <= max(1, width - 1)


@pytest.mark.parametrize("animated", [True, False])
def test_quiet_shows_no_status(monkeypatch, clock, animated):
    """With --quiet nothing is drawn, on a terminal or off."""
    file = FakeTerminal()
    line = status_on(monkeypatch, file, animated=animated, quiet=True)
    clock.seconds += 100
    line.update(progress(), beside_output=True)
    line.clear()
    assert file.getvalue() == ""


# Messages and consoles


@contextmanager
def broken_pipe():
    """A text file on a pipe that nobody reads; closing it fails no more than it must."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    file = os.fdopen(write_end, "w")
    try:
        yield file
    finally:
        with suppress(BrokenPipeError):
            file.close()


def messages_on(monkeypatch, file, **options):
    monkeypatch.setattr(sys, "stderr", file)
    return Messages(**options)


@pytest.mark.parametrize("columns", ["1", "40", "500"])
def test_a_message_is_one_line_at_any_width(monkeypatch, columns):
    """A long message with line ends in it is one line, whatever the width of the terminal."""
    monkeypatch.setenv("COLUMNS", columns)
    file = io.StringIO()
    messages_on(monkeypatch, file).error("word " * 100 + "\nsecond\r\n\tthird")
    assert file.getvalue().count("\n") == 1
    assert file.getvalue().startswith("streamchat: word word")
    assert file.getvalue().endswith("third\n")


def test_a_message_is_never_parsed_as_markup_and_obeys_no_escape_code(monkeypatch):
    """Brackets and emoji codes are shown as written; escape codes are shown, not obeyed."""
    file = io.StringIO()
    messages_on(monkeypatch, file, color="always").error(HOSTILE + " \x1b[2J\x07")
    assert file.getvalue() == f"streamchat: {HOSTILE} ␛[2J␇\n"


def test_quiet_leaves_errors_only(monkeypatch):
    """With quiet, `say` writes nothing and `error` still does."""
    file = io.StringIO()
    messages = messages_on(monkeypatch, file, quiet=True)
    messages.say("loading")
    with messages.working() as working:
        working("converting")
    assert file.getvalue() == ""
    messages.error("no such file")
    assert file.getvalue() == "streamchat: no such file\n"


def test_off_a_terminal_work_is_shown_as_lines(monkeypatch):
    """Each step of the work is a line of its own, without a spinner."""
    file = io.StringIO()
    with messages_on(monkeypatch, file).working() as working:
        working("loading tiny")
        working("checking")
    assert file.getvalue() == "streamchat: loading tiny\nstreamchat: checking\n"


@needs_full
def test_a_message_that_cannot_be_written_is_dropped(monkeypatch):
    """A full disk behind standard error does not turn a message into a crash."""
    with FULL.open("w", buffering=1) as file:
        with pytest.raises(OSError, match="space"):
            file.write("it is full\n")
        messages_on(monkeypatch, file).error("gone")
        monkeypatch.undo()
        with pytest.raises(OSError, match="space"):
            file.close()


@posix_only
def test_a_message_whose_reader_left_is_dropped(monkeypatch, tmp_path):
    """Whoever read standard error has had enough; the data on standard output still counts."""
    with (
        broken_pipe() as broken,
        standard_output(monkeypatch, (tmp_path / "out").open("w")),
    ):
        messages_on(monkeypatch, broken).error("anyone there?")
        Output().line("data")
    assert (tmp_path / "out").read_text(encoding="utf-8") == "data\n"


COLOR_RULES = list(
    itertools.product(
        ["auto", "always", "never"],
        [None, "", "1"],
        [None, "", "1"],
        [False, True],
        ["xterm", "dumb"],
    )
)
"""Every flag, NO_COLOR, FORCE_COLOR, whether on a terminal, and which."""


@pytest.mark.parametrize(("flag", "no_color", "force_color", "terminal", "term"), COLOR_RULES)
@pytest.mark.parametrize("stderr", [True, False])
def test_colour_rules(monkeypatch, flag, no_color, force_color, terminal, term, stderr):
    """NO_COLOR beats FORCE_COLOR, the flag beats both, each stream is judged by itself.

    A dumb terminal has no colours.
    """
    by_itself = not no_color and (terminal or bool(force_color))
    coloured = term != "dumb" and {"auto": by_itself, "always": True, "never": False}[flag]
    monkeypatch.setenv("TERM", term)
    monkeypatch.delenv("COLORTERM", raising=False)
    for name, value in {"NO_COLOR": no_color, "FORCE_COLOR": force_color}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    file = FakeTerminal() if terminal else io.StringIO()
    other = io.StringIO() if terminal else FakeTerminal()
    monkeypatch.setattr(sys, "stderr", file if stderr else other)
    monkeypatch.setattr(sys, "stdout", other if stderr else file)
    make_console(flag, stderr=stderr).print("red", style="red")
    assert ("\x1b" in file.getvalue()) == coloured
    assert other.getvalue() == ""


def test_with_standard_error_closed_messages_do_not_go_to_standard_output(monkeypatch):
    """`2>&-` leaves nobody to tell; standard output is for data only."""
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    monkeypatch.setattr(sys, "stderr", None)
    Messages().error("no such file")
    assert file.getvalue() == ""


@pytest.mark.parametrize(
    ("term", "terminal", "expected"),
    [("xterm", True, True), ("dumb", True, False), ("", True, False), ("xterm", False, False)],
)
def test_animation_needs_a_terminal_that_is_not_dumb(monkeypatch, term, terminal, expected):
    """Nothing is redrawn off a terminal, whatever FORCE_COLOR says, nor on a dumb one."""
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stderr", FakeTerminal() if terminal else io.StringIO())
    assert can_animate() == expected


def test_plain_redraws_and_draws_nothing(monkeypatch):
    """On a terminal that could do both."""
    monkeypatch.setenv("TERM", "xterm")
    for stream in ("stderr", "stdout"):
        monkeypatch.setattr(sys, stream, FakeTerminal())
    assert can_animate()
    assert can_draw()
    set_plain(True)
    try:
        assert not can_animate()
        assert not can_draw()
    finally:
        set_plain(False)


def test_a_missing_or_closed_stream_is_no_terminal():
    """`is_tty` answers for streams that a shell closed."""
    closed = io.StringIO()
    closed.close()
    assert not is_tty(None)
    assert not is_tty(closed)
    assert is_tty(FakeTerminal())


# Standard output


@contextmanager
def standard_output(monkeypatch, file):
    """A file in the place of standard output; a fixture would lose it to pytest's capture."""
    with file, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        yield


@contextmanager
def piped_output(monkeypatch):
    """Standard output on a pipe; gives the end to read from, an unbuffered file."""
    read_end, write_end = os.pipe()
    with (
        os.fdopen(read_end, "rb", buffering=0) as reader,
        standard_output(monkeypatch, os.fdopen(write_end, "w")),
    ):
        yield reader


@posix_only
def test_each_line_is_flushed(monkeypatch):
    """A line is readable at the other end as soon as it was written, as UTF-8."""
    with piped_output(monkeypatch) as reader:
        os.set_blocking(reader.fileno(), False)
        Output().line("naïve 我")
        assert reader.read(100) == "naïve 我\n".encode()


@posix_only
def test_on_a_pipe_the_data_is_left_as_it_is_but_for_what_utf8_cannot_hold(monkeypatch):
    """Control characters are data on a pipe; a lone surrogate does not crash it."""
    with piped_output(monkeypatch) as reader:
        Output().line("a\x1b[2Jb\x00\ud800")
        assert reader.read(100) == b"a\x1b[2Jb\x00?\n"


@posix_only
def test_a_reader_that_left_is_noticed_when_writing(monkeypatch):
    """Writing to a pipe without a reader says so, and the flush at exit then fails no more."""
    with piped_output(monkeypatch) as reader:
        output = Output()
        reader.close()
        with pytest.raises(ReaderGone):
            output.line("anyone there?")
        sys.stdout.flush()
        output.line("to nowhere now")


@posix_only
def test_a_reader_that_left_is_noticed_while_there_is_nothing_to_write(monkeypatch):
    """`check_reader` is silent while there is a reader, and raises once there is none."""
    with piped_output(monkeypatch) as reader:
        output = Output()
        output.check_reader()
        reader.close()
        with pytest.raises(ReaderGone):
            output.check_reader()


@needs_full
def test_a_full_disk_is_an_output_error_with_the_reason(monkeypatch):
    """What the system says is in the message, and the flush at exit then fails no more."""
    with standard_output(monkeypatch, FULL.open("w")):
        with pytest.raises(OutputError, match=r"standard output: No space left on device$"):
            Output().line("data")
        sys.stdout.flush()


def test_closed_standard_output_is_an_output_error(monkeypatch):
    """With `>&-` Python has no standard output; writing is an error of the documented kind."""
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(OutputError, match="closed"):
        Output().line("data")


def test_closed_standard_output_does_not_crash_the_look_for_a_reader(monkeypatch):
    """With `>&-` and nothing to write there is nothing to complain about, or an OutputError."""
    monkeypatch.setattr(sys, "stdout", None)
    try:
        Output().check_reader()
    except OutputError:
        return


# Tables

HEADER = ("depth", "decode t/s")
CELLS = [["1x", "38.9 ± 0.2"], ["16x", "38.7 ± 0.2"]]


def test_a_markdown_table_is_aligned_and_complete():
    """Every line is as wide as the others, and the cells come back from it."""
    lines = markdown_table(HEADER, CELLS).splitlines()
    assert len({cell_len(line) for line in lines}) == 1
    parsed = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert parsed[0] == list(HEADER)
    assert set("".join(parsed[1])) == {"-", ":"}
    assert parsed[2:] == CELLS


def test_json_and_csv_give_the_records_back():
    """Reading the output gives the records that went in, commas and quotes included."""
    records = [{"name": 'a, "b"', "rate": 1.5}, {"name": "我", "rate": 2.0}]
    assert [json.loads(line) for line in json_lines(records).splitlines()] == records
    read = list(csv.DictReader(io.StringIO(csv_text(records))))
    assert [{**row, "rate": float(row["rate"])} for row in read] == records


@pytest.mark.parametrize("width", [20, 40, 120])
def test_a_table_on_a_narrow_terminal_loses_no_character(width):
    """Cells are folded, not cut: every digit is still there."""
    file = io.StringIO()
    print_table(Console(file=file, width=width), HEADER, CELLS)
    for row in CELLS:
        for char in "".join(row).replace(" ", ""):
            assert file.getvalue().count(char) >= "".join(map("".join, CELLS)).count(char)
    assert all(cell_len(line) <= width for line in file.getvalue().splitlines())
