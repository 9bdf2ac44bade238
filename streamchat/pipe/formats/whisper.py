"""Lines of Whisper programs: `[00:00:00.000 --> 00:00:05.000]   text`, or text alone.

whisper.cpp's `whisper-cli` and `whisper-stream`, openai-whisper, whisperX, and what users of
faster-whisper print. Only what a line shows in the end counts, not what was overwritten on the way.
"""

import re

from streamchat.pipe.formats.cue import Cue, Format
from streamchat.pipe.formats.speakers import take_speaker
from streamchat.pipe.formats.times import CLOCK, seconds

TIME = rf"({CLOCK}|[0-9]{{1,9}}(?:\.[0-9]{{1,9}})?)s?"
SEGMENT = re.compile(rf"\s*(?:Transcript:\s*)?\[\s*{TIME}\s*--?>\s*{TIME}\s*\](.*)$", re.DOTALL)
BLOCK_START = re.compile(
    r"\s*### Transcription \d+ START(?:\s*\|\s*t0 = (\d{1,12}) ms\s*\|\s*t1 = (\d{1,12}) ms)?"
)
BLOCK_END = re.compile(r"\s*### Transcription \d+ END")
TURN = re.compile(r"\s*\[SPEAKER_TURN\]")
ERASE = "\x1b[2K"
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
DETECTING = "Detecting language using up to the first"
BEFORE_SPEECH = (DETECTING, "Detected language: ")
START_SPEAKING = "[Start speaking]"
SILENCE = "[BLANK_AUDIO]"


class WhisperLines(Format):
    """Reads them. Times in a block of `whisper-stream` count from the start of the block.

    `[SPEAKER_TURN]`, by whisper.cpp's tinydiarize, says that somebody else speaks in what follows.
    """

    def __init__(self) -> None:
        self._block: tuple[float, float] | None = None
        self._has_spoken = False
        self._turn: int | None = None

    def push(self, text: str, line: int) -> list[Cue]:
        """Add a line; what it says comes at once."""
        text = last_written(text)
        if block := BLOCK_START.match(text):
            self._block = (int(block[1]) / 1000, int(block[2]) / 1000) if block[1] else None
            return []
        if BLOCK_END.match(text):
            self._block = None
            return []
        if not self._has_spoken and text.strip().startswith((START_SPEAKING, *BEFORE_SPEECH)):
            return []
        start, end = self._block or (None, None)
        if segment := SEGMENT.match(text):
            offset = start or 0.0
            start, end = (round(offset + seconds(segment[i]), 3) for i in (1, 2))
            text = segment[3]
        text, num_turns = TURN.subn("", text)
        if num_turns:
            self._turn = self._turn or 1
        turn = self._turn
        if num_turns and turn is not None:
            self._turn = turn + num_turns  # from the next line on
        speaker, text, names = take_speaker(" ".join(text.split()))
        if not text or text == SILENCE:
            return []
        self._has_spoken = True
        return [Cue(text, line, line, start, end, speaker, names, turn)]


def last_written(text: str) -> str:
    """What a terminal shows of a line in the end: text before a carriage return is overwritten."""
    versions = [ESCAPE.sub("", part) for part in text.replace(ERASE, "\r").split("\r")]
    return next((version for version in reversed(versions) if version.strip()), "")
