"""Answers as rows: how wide they are, where they are cut, and how Markdown is styled in them.

What is on a screen is read by an emulator from what was written.
"""

import io
import re

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from streamchat.ui import answer as answer_module
from streamchat.ui import bottom as bottom_module
from streamchat.ui import theme
from streamchat.ui.answer import AnswerView
from streamchat.ui.cells import cells, cluster_ends, wrap_once
from streamchat.ui.markdown import Markdown
from streamchat.ui.rows import Rows

SOURCE = """\
# Whales **and** ships

The *Pequod* sailed from **Nantucket**, see `ship[0]` and 2**3**4.
- one __init__
12. two **half
> said *he*
```python
x = a **b** c  # not bold
  # no heading
```
***
plain again"""

SHOWN = """\
# Whales and ships

The Pequod sailed from Nantucket, see `ship[0]` and 2**3**4.
- one __init__
12. two **half
> said he
```python
x = a **b** c  # not bold
  # no heading
```
***
plain again"""


def rows_of(text, width=200, cuts=(1000,), markdown=True):
    """The rows of a text that comes in pieces."""
    maker, rows, begin, turn = Rows(Markdown() if markdown else None), [], 0, 0
    while begin < len(text):
        end = begin + cuts[turn % len(cuts)]
        rows += maker.feed(text[begin:end], width)
        begin, turn = end, turn + 1
    return [*rows, *maker.end_row()]


def styled(row):
    """The parts of a row with a style of their own."""
    return [(row.plain[span.start : span.end], span.style) for span in row.spans if span.style]


# Markdown


@pytest.mark.parametrize("cuts", [(1,), (3,), (7, 2), (1000,)])
def test_stars_go_where_they_make_words_bold_and_nowhere_else(cuts):
    """Every other character of the source is on the screen, in whatever pieces it comes."""
    assert "\n".join(row.plain for row in rows_of(SOURCE, cuts=cuts)) == SHOWN


def test_each_element_has_its_style():
    """Headings, bold, italics, code, quotations, lists, blocks of code: by the theme's names."""
    rows = dict(zip(SOURCE.splitlines(), rows_of(SOURCE), strict=True))
    heading = rows["# Whales **and** ships"]
    assert heading.style == theme.style("heading")
    assert styled(heading) == [("and", theme.style("strong"))]
    assert styled(rows["The *Pequod* sailed from **Nantucket**, see `ship[0]` and 2**3**4."]) == [
        ("Pequod", theme.style("emphasis")),
        ("Nantucket", theme.style("strong")),
        ("`ship[0]`", theme.style("code")),
    ]
    mark, strong = theme.style("marks"), theme.style("strong")
    item = styled(rows["- one __init__"])
    assert item == [("- ", mark), ("__", strong), ("init", strong), ("__", strong)]
    assert styled(rows["12. two **half"]) == [("12. ", mark)]
    quote = styled(rows["> said *he*"])
    assert ("> ", mark) in quote
    assert ("said he", theme.style("quote")) in quote
    for inside in ("x = a **b** c  # not bold", "  # no heading"):
        assert str(rows[inside].style) == theme.style("listing")
        assert not rows[inside].spans
    for line in ("```python", "```", "***"):
        assert rows[line].style == mark
    assert not rows["plain again"].spans


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("**bol", "**bol"),
        ("a ** b ** c", "a ** b ** c"),
        ("*args, **kwargs", "*args, **kwargs"),
        ("2*3*4", "2*3*4"),
        ("`**x**` **y**", "`**x**` y"),
        ("`` ` `` and ` `` `", "`` ` `` and ` `` `"),
        (r"\*no\* *yes*", r"\*no\* yes"),
        ("***both***", "both"),
        ("**a *b* c**", "a b c"),
        ("_under_ __score__", "_under_ __score__"),
        ("[link](http://x) <b> &amp; ![i](u)", "[link](http://x) <b> &amp; ![i](u)"),
        ("[red]x[/] :smile:", "[red]x[/] :smile:"),
        ("**我** *é*", "我 é"),
        ("* item *", "* item *"),
        ("**Note:** x", "Note: x"),
        ("```not a block``` x", "```not a block``` x"),
        ("x  y ", "x  y "),
    ],
)
def test_what_stays_to_the_letter(source, shown):
    """Half-open marks, arithmetic, code, links, escapes; only whole pairs of stars go."""
    (row,) = rows_of(source)
    assert row.plain == shown


@pytest.mark.parametrize(
    ("lines", "inside"),
    [
        (["```", "x", "```", "y"], ["x"]),
        (["~~~", "```", "~~~", "y"], ["```"]),
        (["````", "```", "x", "````", "y"], ["```", "x"]),
        (["- a", "  ```py", "  x", "  ```", "y"], ["  x"]),
        (["```", "``` x", "x"], ["``` x", "x"]),
    ],
)
def test_blocks_of_code_begin_and_end_by_their_fences(lines, inside):
    """A block ends at a fence of its own kind and length; one that is open goes to the end."""
    rows = rows_of("\n".join(lines))
    found = [row.plain for row in rows if str(row.style) == theme.style("listing")]
    assert [row.plain for row in rows] == lines
    assert found == inside


MARKS = st.text(st.sampled_from("ab *_`#>-~\\\n[]我1."), max_size=120)


@given(text=MARKS, cuts=st.lists(st.integers(1, 30), min_size=1), width=st.integers(1, 60))
def test_markdown_loses_nothing_but_stars(text, cuts, width):
    """At any width and in any pieces: the same rows, which fit, with every character in order.

    Stars may be gone, and spaces where a row was cut.
    """
    rows = rows_of(text, width, cuts)
    shown = [row.plain for row in rows]
    assert shown == [row.plain for row in rows_of(text, width)]
    assert all(cells(row) <= width or len(row) == 1 for row in shown)
    assert re.sub(r"[* ]", "", "".join(shown)) == re.sub(r"[* \n]", "", text)


@given(text=MARKS)
def test_on_rows_that_are_wide_enough_the_lines_are_kept(text):
    """Without a cut each row is a line, its spaces included, but for stars."""
    shown = [row.plain.replace("*", "") for row in rows_of(text, 1000)]
    lines = text.replace("*", "").split("\n")
    assert shown == (lines if text.split("\n")[-1] else lines[:-1])


def test_code_is_cut_without_losing_a_space():
    """A line of code that is too long goes on in the next row to the letter."""
    rows = rows_of("```\nif a  and  b and c:\n```\nwords are cut at a space", 10)
    shown = [row.plain for row in rows]
    assert "".join(shown[1:3]) == "if a  and  b and c:"
    assert shown[4:] == ["words are", "cut at a", "space"]


def test_bold_that_does_not_end_in_its_row_is_shown_with_its_stars():
    """A row is never changed once it is final."""
    shown = [row.plain for row in rows_of("some **words that are bold** end", 14, (1,))]
    assert shown == ["some **words", "that are", "bold** end"]


def test_thinking_is_no_markdown():
    """Text in a style of its own is shown as it is."""
    maker = Rows(Markdown())
    maker.set_style("dim")
    (row,) = [*maker.feed("**x**", 80), *maker.end_row()]
    assert (row.plain, str(row.style)) == ("**x**", "dim")


# Cells

FAMILY = "👩\u200d👩\u200d👧"


@pytest.mark.parametrize(
    ("text", "widest"),
    [("abc", 3), ("我很", 4), ("e\u0301", 1), (FAMILY, 6), ("❤\ufe0f", 2), ("שלום", 4), ("🇩🇪", 4)],
)
def test_text_is_as_wide_as_on_the_terminal_that_makes_most_of_it(text, widest):
    """Emoji of parts count each part; marks count nothing."""
    assert cells(text) == widest


@pytest.mark.parametrize("cluster", ["e\u0301", FAMILY, "👍🏽", "🇩🇪", "❤\ufe0f", "\u0e01\u0e47"])
def test_what_belongs_together_is_not_cut(cluster):
    """A letter and its mark, the parts of an emoji: one row has all of them."""
    assert cluster_ends(cluster * 3) == [len(cluster) * n for n in (1, 2, 3)]
    width = cells(cluster) * 2 + 1
    head, rest = wrap_once(cluster * 5, min(width, cells(cluster) * 5 - 1))
    assert len(head) % len(cluster) == len(rest) % len(cluster) == 0


WIDE = f"שלום 我很好 e\u0301e\u0301 {FAMILY} 👍🏽 🇩🇪🇫🇷 ❤\ufe0f ก็ Ω " * 12


@pytest.mark.parametrize("columns", [2, 7, 40, 80, 200])
def test_no_row_of_any_script_is_wider_than_the_terminal(monkeypatch, columns):
    """Every character of the text was written, in order, and the emulator has wrapped nothing."""
    monkeypatch.setattr(answer_module, "can_animate", lambda: True)
    monkeypatch.setattr(bottom_module, "REDRAW_SECONDS", 0.0)
    console = terminal_console(columns)
    view = AnswerView(console, status, markdown=True)
    for begin in range(0, len(WIDE), 5):
        view.write(WIDE[begin : begin + 5])
    view.close()
    finals = [row.plain for row in rows_of(WIDE, columns - 1)]
    if columns > 6:
        assert all(cells(row) < columns for row in finals)
    assert "".join(finals).replace(" ", "") == WIDE.replace(" ", "")
    screen = emulate(console, columns, rows=3000)
    assert screen.cursor.x == 0
    if columns > 6:
        assert screen.cursor.y == len(finals)
        # pyte puts marks into the cell of their letter.
        shown = "".join(screen.display).replace(" ", "")
        assert shown.count("我") == WIDE.count("我")
        assert shown.count("Ω") == WIDE.count("Ω")


# What is redrawn


def status(width):
    return Text("the status of it all"[:width])


def terminal_console(columns, rows=24):
    return Console(file=io.StringIO(), force_terminal=True, width=columns, height=rows)


def emulate(console, columns, rows):
    screen = pyte.Screen(columns, rows)
    screen.set_mode(pyte.modes.LNM)  # a line feed returns too, as a tty makes it
    # At a character without a cell that is no accent, pyte forgets the rest of the row.
    pyte.Stream(screen).feed(re.sub("[\u200d\ufe0f\u0e47]", "", console.file.getvalue()))
    return screen


@pytest.fixture
def redrawn(monkeypatch):
    monkeypatch.setattr(answer_module, "can_animate", lambda: True)
    monkeypatch.setattr(bottom_module, "REDRAW_SECONDS", 0.0)


def take(console):
    """What was written since the last time."""
    written = console.file.getvalue()
    console.file.seek(0)
    console.file.truncate()
    return written


class Reflowing:
    """A terminal that wraps its lines anew when it is resized, as many do, and an xterm does not.

    Lines are kept whole, and the cursor's place in them; only what `Bottom` writes is understood.
    """

    def __init__(self, columns):
        self.columns = columns
        self.lines, self.line, self.column = [""], 0, 0

    def feed(self, text):
        for code in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|.|\n", text, re.DOTALL):
            if code == "\n":
                self.line += 1
                self.lines += [""] * (self.line + 1 - len(self.lines))
                self.column = 0
            elif code == "\r":  # to the first column of the screen's row, not of the line
                self.column -= self.column % self.columns
            elif code == "\x1b[J":
                self.lines[self.line] = self.lines[self.line][: self.column]
                del self.lines[self.line + 1 :]
            elif code == "\x1b[A":
                if self.column >= self.columns:
                    self.column -= self.columns
                else:
                    self.line -= 1
                    above = len(self.lines[self.line])
                    self.column = max(0, above - 1) // self.columns * self.columns
            elif not code.startswith("\x1b"):
                line = self.lines[self.line].ljust(self.column)
                self.lines[self.line] = line[: self.column] + code + line[self.column + 1 :]
                self.column += 1


@pytest.mark.parametrize("narrow", [11, 20, 45])
def test_a_resize_leaves_no_status_line_behind(redrawn, narrow):
    """Where the terminal wraps what it shows anew, and where it cuts it: nothing stays twice."""
    console = terminal_console(60)
    view = AnswerView(console, status)
    reflowing, cutting = Reflowing(60), pyte.Screen(60, 24)
    cutting.set_mode(pyte.modes.LNM)
    stream = pyte.Stream(cutting)
    for index, width in enumerate([60, narrow, 60, narrow, 30]):
        reflowing.columns = console.width = width
        cutting.resize(24, width)
        view.write(f"words of part {index} that go on ")
        written = take(console)
        reflowing.feed(written)
        stream.feed(written)
    assert sum("the status" in line for line in reflowing.lines) == 1
    assert sum("the status" in row for row in cutting.display) == 1
    view.close()
    written = take(console)
    reflowing.feed(written)
    stream.feed(written)
    words = "".join(f"words of part {index} that go on " for index in range(5)).split()
    assert " ".join(reflowing.lines).split() == words
    assert not any("status" in row for row in cutting.display)


@pytest.mark.parametrize("columns", [1, 2, 3, 40, 200])
@pytest.mark.parametrize("rows", [1, 2, 24])
def test_at_any_size_the_answer_is_there_and_the_status_is_not(redrawn, columns, rows):
    """From one cell to a wide screen: the text to the letter, after it nothing."""
    console = terminal_console(columns, rows)
    view = AnswerView(console, status, markdown=True)
    for char in "one two three":
        view.write(char)
    view.close()
    shown = "".join(emulate(console, columns, 30).display)
    assert "".join(shown.split()) == "onetwothree"


def test_the_cursor_is_hidden_while_it_answers(redrawn):
    """And is there again afterwards."""
    console = terminal_console(40)
    view = AnswerView(console, status)
    assert take(console).startswith("\x1b[?25l")
    view.close()
    assert take(console).endswith("\x1b[?25h")
