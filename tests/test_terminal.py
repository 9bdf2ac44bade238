"""The real program on a real (pseudo) terminal, its screen read by an emulator.

pexpect gives the terminal, pyte says what a person would see on it.
"""

import os
import re
import shlex
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import streamchat

if sys.platform == "win32":
    pytest.skip("pseudo terminals are POSIX", allow_module_level=True)

import pexpect
import pyte

# Python 3.12 warns of forking a process that has threads; the child only starts a program.
pytestmark = pytest.mark.filterwarnings("ignore:.*forkpty.*:DeprecationWarning")

START_SECONDS = 90
NUM_LINES = 5_000
ROWS = 24

SCORED = re.compile(r"\d+\.\d{3} +(-|[+-]\d+\.\d\d) +line \d+ of the stream")
STATUS = re.compile(r"(\d[\d,]*)/64 │ evicted (\d[\d,]*) │ (\d[\d,]*) tok/s")

ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith("STREAMCHAT_")
    and name not in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "LINES")
} | {
    "PYTHONPATH": str(Path(streamchat.__file__).parents[1]),
    "PYTHONIOENCODING": "utf-8",
    "HF_HUB_OFFLINE": "1",
    "STREAMCHAT_CONFIG": "",
    "TERM": "xterm-256color",
}


class Terminal:
    """The program on a terminal of `columns`, and every screen that it has shown.

    Args:
        command: A shell command; `PROGRAM` in it stands for streamchat.
        columns: Width of the terminal.
        environment: Added to the program's.
    """

    def __init__(self, command, columns, **environment):
        program = f"exec {shlex.quote(sys.executable)} -m streamchat"
        self.child = pexpect.spawn(
            "/bin/sh",
            ["-c", command.replace("PROGRAM", program)],
            dimensions=(ROWS, columns),
            env=ENVIRONMENT | environment,
            timeout=START_SECONDS,
        )
        self.screen = pyte.HistoryScreen(columns, ROWS, history=100_000, ratio=0.5)
        self.stream = pyte.ByteStream(self.screen)
        self.received = b""
        self.shown = []

    def read(self, until=lambda: False):
        """Show what comes, until something is true or the program has ended."""
        deadline = time.monotonic() + START_SECONDS
        while not until():
            assert time.monotonic() < deadline, f"waited in vain:\n{self.text()}"
            try:
                data = self.child.read_nonblocking(4096, timeout=0.2)
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                break
            self.received += data
            self.stream.feed(data)
            self.shown += [row.rstrip() for row in self.screen.display if row.strip()]

    def finish(self):
        """Read to the end; gives the exit code."""
        self.read()
        self.child.close()
        return self.child.exitstatus

    def rows(self):
        """What stands on the terminal, what was scrolled away included, at its full width."""
        history = [
            "".join(row[column].data for column in range(self.screen.columns))
            for row in self.screen.history.top
        ]
        return [*history, *self.screen.display]

    def lines(self):
        """The rows that are not empty, without the spaces at their ends."""
        return [row.rstrip() for row in self.rows() if row.strip()]

    def text(self):
        """All rows as one: a message that was wrapped is whole again."""
        return "".join(self.rows()).rstrip()

    def statuses(self):
        """Every status line that stood on the screen at some time: held, evicted, rate."""
        found = [STATUS.search(row) for row in self.shown]
        return [tuple(int(n.replace(",", "")) for n in match.groups()) for match in found if match]


def score(folder, rest="", sizes="--sinks 4 --window 60"):
    return f"PROGRAM pipe --mode score -m {shlex.quote(str(folder))} {sizes} {rest}"


@contextmanager
def live(folder, tmp_path, columns, **environment):
    """The program waiting at a pipe; gives the terminal and a function that sends a line."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    terminal = Terminal(score(folder, f"< {fifo}"), columns, **environment)
    with fifo.open("w", encoding="utf-8") as source:

        def send(line):
            source.write(f"{line}\n")
            source.flush()
            terminal.read(lambda: f"\t{line}\r\n".encode() in terminal.received)

        terminal.read(lambda: b"waiting for input" in terminal.received)
        yield terminal, send


@pytest.mark.parametrize("columns", [80, 40])
def test_the_status_line_shows_a_stream_while_its_lines_go_elsewhere(
    tiny_folder, tmp_path, columns
):
    """Standard error on a terminal: used and size, evicted, rate, in one redrawn line.

    Nothing of it is left in the end, and no other row of the terminal was touched.
    """
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text(
        "".join(f"line {n} of the stream\n" for n in range(NUM_LINES)), encoding="utf-8"
    )
    terminal = Terminal(score(tiny_folder, f"< {source} > {target}"), columns)
    assert terminal.finish() == 0
    statuses = terminal.statuses()
    assert len(set(statuses)) >= 3
    assert all(held == 64 for held, _, _ in statuses[1:])
    evicted = [evicted for _, evicted, _ in statuses]
    assert evicted == sorted(evicted)
    assert evicted[-1] > 1000
    assert statuses[-1][2] > 100
    if columns == 80:
        assert any(row.startswith("█" * 20 + " 64/64 │ evicted") for row in terminal.shown)
    text = terminal.text()
    assert not STATUS.search(text)
    assert "█" not in text
    assert "…" not in text
    # Two messages, wrapped at the width, and nothing besides.
    assert text.startswith("streamchat: tiny-llama on cpu, 4 pinned + 60 newest")
    assert f"end of input: {NUM_LINES:,} lines" in text
    assert text.count("streamchat: ") == 2
    texts = target.read_text(encoding="utf-8").splitlines()
    assert [line.split("\t")[2] for line in texts] == [
        f"line {n} of the stream" for n in range(NUM_LINES)
    ]
    assert "\x1b" not in target.read_text(encoding="utf-8")


@pytest.mark.parametrize("columns", [80, 40])
def test_lines_and_status_share_a_terminal(tiny_folder, tmp_path, columns):
    """Both streams on one terminal: every line stands there whole, and no status between them."""
    with live(tiny_folder, tmp_path, columns) as (terminal, send):
        for number in range(40):
            send(f"line {number} of the stream")
            seen = len(terminal.statuses())
            terminal.read(lambda seen=seen: len(terminal.statuses()) > seen)
    assert terminal.finish() == 0
    evicted = [evicted for _, evicted, _ in terminal.statuses()]
    assert evicted == sorted(evicted)
    assert len(set(evicted)) > 30
    rows = terminal.lines()
    scored = [row for row in rows if SCORED.fullmatch(row)]
    assert [int(row.split()[3]) for row in scored] == list(range(40))
    first, last = rows.index(scored[0]), rows.index(scored[-1])
    assert last - first == 39
    assert not any("tok/s" in row or "█" in row for row in rows)
    assert "end of input: 40 lines" in "".join(rows[last + 1 :])


def test_ctrl_c_on_a_terminal_leaves_a_clean_screen(tiny_folder, tmp_path):
    """Ctrl-C while a stream is idle: 130, the status line is gone, the summary is there."""
    with live(tiny_folder, tmp_path, 160) as (terminal, send):
        for number in range(3):
            send(f"line {number}")
        terminal.read(lambda: terminal.statuses() and terminal.statuses()[-1][0] == 21)
        terminal.child.sendintr()
        assert terminal.finish() == 130
    rows = terminal.lines()
    assert not any(STATUS.search(row) for row in rows)
    assert [row.split()[-2:] for row in rows[-4:-1]] == [["line", str(n)] for n in range(3)]
    assert "streamchat: stopped: 3 lines, 21 tokens, 0 evicted" in rows[-1].replace("^C", "")


def test_escape_codes_in_the_input_are_shown_and_not_obeyed(tiny_folder, tmp_path):
    """Text that would clear the screen, set its title or ring: visible symbols on a terminal."""
    source = tmp_path / "hostile.txt"
    source.write_bytes(b"before\n\x1b[2J\x1b]0;title\x07 [red]x[/] :smile: \x9b31m\nafter\n")
    terminal = Terminal(score(tiny_folder, f"{source}"), 80, NO_COLOR="1")
    assert terminal.finish() == 0
    rows = terminal.lines()
    [hostile] = [row for row in rows if "title" in row]
    assert "␛[2J␛]0;title␇ [red]x[/] :smile: \ufffd31m" in hostile
    assert any(row.endswith("before") for row in rows)
    assert any(row.endswith("after") for row in rows)
    assert b"\x1b[2J" not in terminal.received
    assert b"\x07" not in terminal.received
    assert terminal.screen.title == ""


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"STREAMCHAT_PLAIN": "1"}], ids=str)
def test_where_nothing_is_redrawn_there_is_no_escape_code(tiny_folder, tmp_path, environment):
    """TERM=dumb, or --plain on any terminal: no animation, plain lines, in order."""
    with live(tiny_folder, tmp_path, 160, **environment) as (terminal, send):
        for number in range(5):
            send(f"line {number}")
    assert terminal.finish() == 0
    assert b"\x1b" not in terminal.received
    assert b"\r" not in terminal.received.replace(b"\r\n", b"")
    rows = terminal.lines()
    assert rows[0] == "streamchat: loading tiny-llama"
    scored = [row.split()[2:] for row in rows if not row.startswith("streamchat: ")]
    assert scored == [["line", str(n)] for n in range(5)]


@pytest.mark.parametrize("columns", [80, 20])
def test_without_input_it_says_how_to_give_some(columns):
    """Standard input is the terminal: a line that shows a command to type, and exit 2, at once."""
    terminal = Terminal("PROGRAM pipe --mode score", columns)
    started = time.monotonic()
    assert terminal.finish() == 2
    assert time.monotonic() - started < 5
    message = terminal.text()
    assert message.startswith("streamchat: nothing to read: pipe text in")
    assert "COMMAND | streamchat pipe" in message
    assert message.count("streamchat: ") == 1


def test_a_hang_up_ends_the_program(tiny_folder, tmp_path):
    """Closing the terminal's window leaves no process behind that waits for input.

    It ends in order, as for the other signals: there may be something to save.
    """
    with live(tiny_folder, tmp_path, 80) as (terminal, _):
        terminal.child.kill(signal.SIGHUP)
        assert terminal.finish() == 129
    assert not terminal.child.isalive()


@pytest.mark.parametrize("columns", [80, 40])
def test_a_question_is_typed_into_the_status_line_and_answered(tiny_folder, tmp_path, columns):
    """`--ask` while the input streams: the draft stands alone in the last row, and goes with Enter.

    The answer is an event on standard output; here that is the terminal, too. No key is echoed
    anywhere else, and Ctrl-C still stops the run and gives the terminal back.
    """
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    options = f"-m {shlex.quote(str(tiny_folder))} --window 900 --max-new 4 --ask"
    terminal = Terminal(f"trap : INT; (PROGRAM pipe {options} < {fifo}); stty -a", columns)
    with fifo.open("w", encoding="utf-8") as source:
        terminal.read(lambda: b"ask at any time" in terminal.received)
        source.write("The ship was the Pequod.\n")
        source.flush()
        terminal.child.send("What was \x1b[Ait called")
        terminal.read(lambda: any(row == "? What was it called▌" for row in terminal.shown))
        assert terminal.screen.display[terminal.screen.cursor.y].startswith("? What was it called▌")
        terminal.child.send("?\r")
        terminal.read(lambda: b"[asked after line 1: What was it called?]" in terminal.received)
        terminal.child.sendintr()
        terminal.finish()
    rows = terminal.lines()
    assert not any(row.startswith("? ") for row in rows)
    assert sum("What was it called" in row for row in rows) == 1
    text = terminal.text()
    assert "stopped: 1 line" in text
    assert " echo " in text
    assert " icanon" in text
