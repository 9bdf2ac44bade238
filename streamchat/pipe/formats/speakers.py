"""Who speaks, by what a line begins with."""

import re

LABEL = re.compile(r"\[([^\[\]]{1,40})\]:\s*|\((speaker [0-9?]+)\)\s*", re.IGNORECASE)
"""`[SPEAKER_00]:` (whisperX) and `(speaker 0)` (whisper.cpp): marks, no words."""

NAME = re.compile(
    # Each word begins with a capital, a digit, or a letter of a script without capitals.
    r"(?:[->\u2013\s]+\s)?(?P<name>[^\Wa-z_0-9][\w.'\u2019-]*(?:\ [^\Wa-z_][\w.'\u2019-]*){0,3})"
    r"\s?[:\uff1a](?=\s+\S)"
)
"""`Ann:`, `Speaker 1:`, `>> DR. LEE:`: part of the text."""

MAX_NAME_CHARS = 40

NO_NAMES = {
    *("alert", "critical", "debug", "emerg", "error", "fatal", "fixme", "info", "note", "notice"),
    *("panic", "todo", "trace", "traceback", "warn", "warning"),
}
"""What logs begin with."""


def named_speaker(text: str) -> str | None:
    """The name in front of a colon, or None."""
    match = NAME.match(text)
    if match is None:
        return None
    name = match["name"]
    is_name = len(name) <= MAX_NAME_CHARS and not name[0].islower()
    return name if is_name and name.casefold() not in NO_NAMES else None


def take_speaker(text: str) -> tuple[str | None, str, bool]:
    """The speaker of a transcript's line, its text without marks, and whether that has the name."""
    if match := LABEL.match(text):
        return match[1] or match[2], text[match.end() :], False
    speaker = named_speaker(text)
    return speaker, text, speaker is not None
