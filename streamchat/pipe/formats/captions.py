"""SRT and WebVTT: blocks of a timing line and text, apart by blank lines.

A cue is complete at the blank line behind it, or at the next timing line where that is missing.
"""

import re

from streamchat.pipe.formats.cue import Cue, Format
from streamchat.pipe.formats.markup import TIME_TAG, clean, spoken
from streamchat.pipe.formats.rolling import Rolling, Shown
from streamchat.pipe.formats.times import timing

SIGNATURE = re.compile(r"WEBVTT(?:[ \t].*)?$")
HEADER = re.compile(r"[\w-]+\s*[:=]")
"""Below the signature: `Kind: captions`, `X-TIMESTAMP-MAP=…`."""

NO_CUE = re.compile(r"NOTE(?:[ \t].*)?$|(?:STYLE|REGION)[ \t]*$")
"""How blocks begin that are not spoken."""

MAX_LINES = 64
"""Of a cue; what goes on without a blank line is no caption, and must not wait for ever."""

NUMBER = re.compile(r"\s*([0-9]{1,9})\s*$")


class Captions(Format):
    """Reads SRT or WebVTT.

    Args:
        is_webvtt: WebVTT, with its header, comments, styles, regions and entities; cues may have
            any text for an identifier. In SRT it is a number.
    """

    def __init__(self, *, is_webvtt: bool) -> None:
        self._is_webvtt = is_webvtt
        self._rolling = Rolling()
        self._timing: tuple[float, float] | None = None
        # Whether the cue of `_timing` goes on; text outside of any is still given its times.
        self._is_open = False
        self._lines: list[tuple[int, str]] = []
        # A line after a blank one: an identifier if a timing line follows, else text.
        self._held: tuple[int, str] | None = None
        self._is_skipping = self._is_header = False
        self._number: int | None = None

    def push(self, text: str, line: int) -> list[Cue]:
        """Add a line; a cue comes with the blank line, or the timing line, behind it."""
        found = timing(text)
        if found:
            return self._begin(found)
        # Only a line without anything ends a cue; YouTube's have lines of one space.
        if not text or (not self._is_open and text.isspace()):
            return self._end()
        if self._is_open:
            self._lines.append((line, text))
            return self._take() if len(self._lines) >= MAX_LINES else []
        if self._is_webvtt and not self._held and SIGNATURE.match(text):
            self._is_header = True
        elif self._is_header and HEADER.match(text):
            pass
        elif self._is_webvtt and not self._held and NO_CUE.match(text):
            self._is_skipping = True
        elif not self._is_skipping:
            self._is_header = False
            if self._held is None:
                self._held = line, text
            else:  # the first of two is no identifier: it is text without a timing line
                self._lines = [self._held, (line, text)]
                self._held, self._is_open = None, True
        return []

    def pause(self) -> list[Cue]:
        """Text that has come of a cue; more of it would have the same times."""
        if self._held is not None and NUMBER.match(self._held[1]):
            return []
        return self.flush()

    def flush(self) -> list[Cue]:
        """What is left, a number too that no timing line followed."""
        if self._held is not None:
            self._lines.append(self._held)
            self._held = None
        return self._take()

    def _begin(self, found: tuple[float, float]) -> list[Cue]:
        """A timing line: end what was open, and open a cue."""
        if self._held is not None:
            if number := NUMBER.match(self._held[1]):
                self._number = int(number[1])
            elif not self._is_webvtt:
                self._lines.append(self._held)
        elif len(self._lines) > 1 and self._number is not None:
            # Where the blank line is missing, the next number stands below the text.
            number = NUMBER.match(self._lines[-1][1])
            if number and int(number[1]) == self._number + 1:
                self._number += 1
                self._lines.pop()
        cues = self._take()
        self._held, self._timing = None, found
        self._is_open, self._is_skipping, self._is_header = True, False, False
        return cues

    def _end(self) -> list[Cue]:
        """A blank line."""
        cues = self.flush()
        self._is_open = self._is_skipping = self._is_header = False
        return cues

    def _take(self) -> list[Cue]:
        lines, self._lines = self._lines, []
        start, end = self._timing or (None, None)
        if start is not None and end is not None:
            shown = [
                Shown(clean(text, has_entities=self._is_webvtt), bool(TIME_TAG.search(text)))
                for _, text in lines
            ]
            repeated = self._rolling.num_repeated(shown, start, end)
            with_words = [line for line, its in zip(lines, shown, strict=True) if its.words]
            lines = with_words[repeated:]
        return [
            Cue(s.text, s.line, s.last_line, start, end, s.speaker, s.text_names_speaker)
            for s in spoken(lines, has_entities=self._is_webvtt)
        ]
