"""Which format an input has, by its first lines."""

import re
from collections.abc import Sequence

from streamchat.pipe.formats import json_lines, whisper, whisper_streaming
from streamchat.pipe.formats.captions import NUMBER, SIGNATURE
from streamchat.pipe.formats.times import TIMING

WHISPER_LABEL = re.compile(r"\[SPEAKER_\d+\]:")
HAS_HOURS = re.compile(r"\s*\[\s*\d+:\d+:\d+")

PLAIN = "plain"


def guess(lines: Sequence[str], *, is_whole: bool) -> str | None:
    """The name of the format, or None if the next line decides.

    Args:
        lines: The first one, and the next if there is one; neither is blank.
        is_whole: Whether the last of them is there to its end.
    """
    first = lines[0]
    if SIGNATURE.match(first):
        return "webvtt"
    if TIMING.match(first):
        return "srt" if "," in first.partition("-->")[0] else "webvtt"
    if NUMBER.match(first):
        if len(lines) == 1:
            return None if is_whole else PLAIN
        return "srt" if TIMING.match(lines[1]) else PLAIN
    if whisper.ERASE in first or whisper.BLOCK_START.match(first):
        return "whisper.cpp"
    if first.strip() == whisper.START_SPEAKING:
        return "whisper.cpp"
    if whisper.SEGMENT.match(first):
        return "whisper.cpp" if HAS_HOURS.match(first) else "whisper"
    if WHISPER_LABEL.match(first) or first.startswith(whisper.DETECTING):
        return "whisper"
    if whisper_streaming.AS_PRINTED.match(first):
        return "whisper-streaming"
    if first.lstrip().startswith("{"):
        if not is_whole:
            return None
        message = json_lines.parse(first)
        return "jsonl" if message is not None and json_lines.kind_of(message) else PLAIN
    return PLAIN
