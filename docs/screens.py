"""Make the README's pictures from the real program: run it on a terminal, and draw what it shows.

    python docs/screens.py

Needs the `test` extra (pexpect, pyte) and a POSIX system. Seeds are fixed; the text on the pictures
still depends on the machine's arithmetic.
"""

import io
import os
import sys
import tempfile
import time
from pathlib import Path

import pexpect
import pyte
from rich.console import Console
from rich.text import Text

FOLDER = Path(__file__).parent
PROGRAM = [sys.executable, "-m", "streamchat"]
TRANSCRIPT = """\
Anna: Good morning. First the budget: the new printer costs 340 euros.
Ben: We have 500 left this quarter, so that is fine. I will order it today.
Anna: Good. Second, the website. Clara, how far are we?
Clara: The shop page is done. The search is not; it needs two more days.
Ben: The customer in Oslo has asked for it twice.
Anna: Then search first. Can we show it on Thursday?
Clara: On Thursday afternoon, yes.
Anna: Thursday at three, then. Ben, please tell Oslo.
"""


class Terminal:
    """A program on a pseudo-terminal, and its screen."""

    def __init__(self, args: list[str], columns: int, rows: int) -> None:
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        # What is said for a picture is no session of the user's.
        self._data = tempfile.TemporaryDirectory(prefix="streamchat-screens-")
        data = {"STREAMCHAT_DATA": self._data.name}
        self._child = pexpect.spawn(
            PROGRAM[0],
            [*PROGRAM[1:], *args],
            dimensions=(rows, columns),
            env=os.environ | data,
        )
        # Answers to the program's questions, such as where the cursor is.
        self.screen.write_process_input = self._child.send

    def wait_for(self, text: str, timeout: float = 120) -> None:
        """Read until `text` is on the screen."""
        deadline = time.monotonic() + timeout
        while not any(text in line for line in self.screen.display):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {text!r} on the screen:\n" + "\n".join(self.screen.display))
            self._read(0.1)

    def watch(self, seconds: float) -> None:
        """Read for a while."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._read(0.1)

    def type(self, text: str) -> None:
        self._child.send(text)

    def close(self) -> None:
        self._child.close(force=True)
        self._data.cleanup()

    def _read(self, timeout: float) -> None:
        try:
            self._stream.feed(self._child.read_nonblocking(65536, timeout))
        except pexpect.TIMEOUT:
            return
        except pexpect.EOF:
            time.sleep(timeout)


def draw(screen: pyte.Screen, title: str, file: Path) -> None:
    """Save a screen as SVG, without its empty rows at the end."""
    rows = [row(screen, number) for number in range(screen.lines)]
    while rows and not rows[-1].plain.strip():
        rows.pop()
    console = Console(record=True, width=screen.columns, file=io.StringIO())
    for text in rows:
        console.print(text, no_wrap=True, overflow="crop")
    console.save_svg(str(file), title=title)


def row(screen: pyte.Screen, number: int) -> Text:
    text = Text()
    for column in range(screen.columns):
        char = screen.buffer[number][column]
        color = "" if char.fg == "default" else char.fg if char.fg.isalpha() else f"#{char.fg}"
        style = f"{'bold ' if char.bold else ''}{'reverse ' if char.reverse else ''}"
        text.append(char.data, (style + color.replace("brown", "yellow")).strip())
    return text


def chat() -> None:
    terminal = Terminal(["chat", "--window", "124", "--seed", "7", "--max-new", "120"], 80, 30)
    terminal.wait_for("loading the model")
    terminal.type("Hello! Who are you?\r")
    terminal.wait_for("/help")
    terminal.wait_for("evicted")
    terminal.watch(2)
    terminal.type("Tell me something about whales.\r")
    terminal.wait_for("^C stop")
    terminal.wait_for("/help")
    terminal.watch(1)
    terminal.type("And where do they live?\r")
    terminal.wait_for("^C stop")
    terminal.watch(0.2)
    terminal.wait_for("^C stop")
    draw(terminal.screen, "streamchat chat", FOLDER / "chat.svg")
    terminal.close()


def notes() -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(TRANSCRIPT)
        file.flush()
        terminal = Terminal(["pipe", file.name, "--every", "70tok", "--max-new", "60"], 80, 24)
        terminal.wait_for("end of input")
        draw(terminal.screen, "streamchat pipe meeting.txt --every 70tok", FOLDER / "notes.svg")
        terminal.close()


if __name__ == "__main__":
    chat()
    notes()
