"""The clipboard, by what the terminal itself can do: nothing is installed for it."""

import base64
import os
import subprocess
from typing import IO

from streamchat.errors import UsageError
from streamchat.ui.console import is_tty

TMUX = ["tmux", "load-buffer", "-w", "-"]
"""Into tmux's buffer, and on to the terminal that it runs in."""

CANNOT = ("", "dumb", "linux")
"""Values of TERM for terminals without a clipboard."""


def copy(text: str, terminal: IO[str]) -> str:
    """Put a text on the clipboard; says in words what was done.

    Elsewhere than in tmux by the escape code OSC 52 (xterm, "Operating System Commands"), which a
    terminal does not answer: one that does not know it ignores it.

    Raises:
        UsageError: If the terminal has no clipboard.
    """
    if os.environ.get("TMUX") and _tmux(text):
        return "copied to tmux's buffer, and to the clipboard if the terminal lets tmux"
    if not is_tty(terminal) or os.environ.get("TERM", "") in CANNOT:
        raise UsageError("this terminal has no clipboard")
    code = base64.b64encode(text.encode("utf-8", "replace")).decode()
    terminal.write(f"\x1b]52;c;{code}\x07")
    terminal.flush()
    return "sent to the terminal's clipboard; if nothing is there, it does not take OSC 52"


def _tmux(text: str) -> bool:
    try:
        done = subprocess.run(
            TMUX, input=text.encode("utf-8", "replace"), capture_output=True, check=False
        )
    except OSError:
        return False
    return done.returncode == 0
