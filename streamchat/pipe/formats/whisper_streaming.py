"""Lines of whisper_streaming: `emitted begin end text`, in milliseconds."""

import re

from streamchat.pipe.formats.cue import Cue, Format
from streamchat.pipe.formats.speakers import take_speaker

LINE = re.compile(r"\s*(?:[0-9]{1,12}\.[0-9]+ )?([0-9]{1,12}) ([0-9]{1,12})(?: (.*))?$", re.DOTALL)
"""Its server leaves the time of emission out."""

AS_PRINTED = re.compile(r"[0-9]+\.[0-9]{4} [0-9]+ [0-9]+ ")


class WhisperStreaming(Format):
    """Reads them: confirmed words only, as they are printed."""

    def push(self, text: str, line: int) -> list[Cue]:
        """Add a line; what it says comes at once."""
        start = end = None
        match = LINE.match(text)
        if match and int(match[1]) <= int(match[2]):
            start, end = int(match[1]) / 1000, int(match[2]) / 1000
            text = match[3] or ""
        speaker, text, names = take_speaker(" ".join(text.split()))
        return [Cue(text, line, line, start, end, speaker, names)] if text else []
