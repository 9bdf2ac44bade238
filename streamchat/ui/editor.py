"""The user's editor."""

import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import IO

from streamchat.errors import StreamchatError, UsageError


def open_in_editor(file: Path, terminal: IO[str] | None = None, otherwise: str = "") -> None:
    """Open a file in $VISUAL or $EDITOR, and wait.

    Args:
        file: The file.
        terminal: Where the editor draws; None for standard output.
        otherwise: What else the user can do where there is no editor.

    Raises:
        UsageError: If there is no editor, or it cannot be started.
        StreamchatError: If it says that it failed.
    """
    try:
        editor = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "")
    except ValueError as error:
        raise UsageError(f"VISUAL or EDITOR is no command: {error}") from error
    if not editor:
        raise UsageError(f"no editor: set VISUAL or EDITOR{otherwise}")
    try:
        code = subprocess.call([*editor, str(file)], stdout=terminal)
    except OSError as error:
        raise UsageError(f"cannot start the editor {editor[0]}: {error.strerror}") from error
    if code:
        raise StreamchatError(f"the editor {editor[0]} ended with {code}")


def edit(text: str, terminal: IO[str] | None = None) -> str:
    """Let the user edit a text; gives it without line ends at its end.

    Raises:
        StreamchatError: If the editor fails, as for `open_in_editor`, or the text is lost.
    """
    with tempfile.TemporaryDirectory(prefix="streamchat-") as folder:
        file = Path(folder) / "turn.md"
        try:
            file.write_text(f"{text}\n" if text else "", encoding="utf-8")
            open_in_editor(file, terminal)
            return file.read_text(encoding="utf-8", errors="replace").rstrip("\n")
        except OSError as error:
            raise StreamchatError(f"cannot edit the turn: {error.strerror}") from error
