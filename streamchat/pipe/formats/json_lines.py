"""JSON lines of live speech recognition: final text only, each once.

WhisperLive repeats its last segments in each message, and the newest may still change; Deepgram and
AssemblyAI send hypotheses until one is final. A hypothesis that nothing has replaced when the input
ends is given then.
"""

import json
import math
import re
from collections import deque
from collections.abc import Callable, Hashable
from itertools import groupby
from typing import Any, TypeAlias

from streamchat.pipe.formats.cue import Cue, Format
from streamchat.pipe.formats.times import CLOCK, seconds

Message: TypeAlias = dict[str, Any]

NUM_REMEMBERED = 256
"""Segments that may come again; WhisperLive repeats ten."""

MAX_OPEN = 64
"""Channels with a hypothesis at a time; more would be no transcript."""

NO_SPEECH = {
    "Begin": "expires_at",
    "Metadata": "request_id",
    "SpeechStarted": "timestamp",
    "Termination": "session_duration_seconds",
    "UtteranceEnd": "last_word_end",
}
"""Types of messages that say nothing of what was said, with something that each has."""

HALF_CHARACTER = re.compile("[\ud800-\udfff]")
MAX_NAME_CHARS = 100
IS_CLOCK = re.compile(CLOCK)


class JsonLines(Format):
    """Reads them; kinds may be mixed. What is no message of a known kind passes as text."""

    def __init__(self) -> None:
        self._seen: deque[Hashable] = deque(maxlen=NUM_REMEMBERED)
        self._open: dict[Hashable, tuple[Hashable, list[Cue]]] = {}
        # A finished turn of AssemblyAI whose formatted version may follow.
        self._turn: tuple[Hashable, list[Cue]] | None = None

    def push(self, text: str, line: int) -> list[Cue]:
        """Add a line; what is final in it comes at once."""
        message = parse(text)
        read = KINDS.get(kind_of(message)) if message is not None else None
        if message is None or read is None:
            words = " ".join(text.split())
            return [*self.pause(), *([Cue(words, line, line)] if words else [])]
        is_same_turn = self._turn is not None and self._turn[0] == _turn_key(message)
        return [*([] if is_same_turn else self.pause()), *read(self, message, line)]

    def pause(self) -> list[Cue]:
        """A finished turn that is still not formatted."""
        turn, self._turn = self._turn, None
        if turn is None:
            return []
        self._seen.append(turn[0])
        return turn[1]

    def flush(self) -> list[Cue]:
        """The same, and hypotheses that nothing has replaced."""
        left = [*self.pause(), *(cue for _, cues in self._open.values() for cue in cues)]
        self._open.clear()
        return left

    def _no_speech(self, _message: Message, _line: int) -> list[Cue]:
        return []

    def _segment(self, message: Message, line: int) -> list[Cue]:
        cues = _cue(message["text"], line, message)
        is_final = not (message.get("completed") is False or message.get("is_final") is False)
        return self._settle("segment", message.get("start"), cues, is_final=is_final)

    def _whisper_live(self, message: Message, line: int) -> list[Cue]:
        segments, client = _dicts(message["segments"]), str(message.get("uid"))
        fresh: list[Cue] = []
        changing: list[Cue] = []
        for index, segment in enumerate(segments):
            cues = _cue(segment.get("text"), line, segment)
            # Older servers do not say which are complete: all but the newest.
            if not segment.get("completed", index < len(segments) - 1):
                changing += cues
                continue
            for cue in cues:
                key = client, cue.start, cue.end, cue.text
                if cue.start is None or key not in self._seen:
                    self._seen.append(key)
                    fresh.append(cue)
        return fresh + self._settle(("segments", client), None, changing, is_final=False)

    def _deepgram(self, message: Message, line: int) -> list[Cue]:
        start, duration = _number(message.get("start")), _number(message.get("duration"))
        end = None if start is None or duration is None else start + duration
        cues = _cues_of_words(message["channel"]["alternatives"][0], line, start, end)
        channel = "channel", str(message.get("channel_index"))
        return self._settle(channel, start, cues, is_final=message.get("is_final") is not False)

    def _assembly_ai(self, message: Message, line: int) -> list[Cue]:
        words, text = _dicts(message.get("words")), message["transcript"]
        is_final = bool(message["end_of_turn"])
        if not is_final:
            # The transcript has the final words only; the list has those too that may change.
            heard = " ".join(str(word.get("text", "")) for word in words)
            text = max(text, heard, key=len)
        fields = {
            "start": _milliseconds(words[0].get("start")) if words else None,
            "end": _milliseconds(words[-1].get("end")) if words else None,
            "speaker": message.get("speaker_label"),
        }
        cues, key = _cue(text, line, fields), _turn_key(message)
        if is_final and key in self._seen:
            cues = []
        elif is_final and message.get("turn_is_formatted") is False:
            self._turn = key, cues
            cues = []
        elif is_final:
            self._turn = None
            self._seen.append(key)
        return self._settle("turn", str(message.get("turn_order")), cues, is_final=is_final)

    def _settle(
        self, channel: Hashable, key: Hashable, cues: list[Cue], *, is_final: bool
    ) -> list[Cue]:
        """Final cues as they are; a hypothesis waits until one with the same key replaces it."""
        before = self._open.pop(channel, None)
        given = before[1] if before is not None and before[0] != key else []
        if is_final or len(self._open) >= MAX_OPEN:
            return given + cues
        self._open[channel] = key, cues
        return given


def parse(text: str) -> Message | None:
    """The JSON object of a line, or None."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def kind_of(message: Message) -> str | None:
    """Which kind of message it is, by what it has, or None."""
    segments = message.get("segments")
    if isinstance(segments, list) and ("uid" in message or _has_text(segments, "text")):
        return "WhisperLive"
    channel = message.get("channel")
    if isinstance(channel, dict) and _has_text(channel.get("alternatives"), "transcript"):
        return "Deepgram"
    if isinstance(message.get("transcript"), str) and "end_of_turn" in message:
        return "AssemblyAI"
    has_time = _number(message.get("start")) is not None
    is_marked = "completed" in message or "is_final" in message
    if isinstance(message.get("text"), str) and (has_time or is_marked):
        return "segment"
    is_status = "uid" in message and (
        message.get("message") in ("SERVER_READY", "DISCONNECT")
        or message.get("status") == "WAIT"
        or "language_prob" in message
    )
    is_known = isinstance(message.get("type"), str) and NO_SPEECH.get(message["type"]) in message
    return "no speech" if is_status or is_known else None


KINDS: dict[str | None, Callable[[JsonLines, Message, int], list[Cue]]] = {
    "WhisperLive": JsonLines._whisper_live,
    "Deepgram": JsonLines._deepgram,
    "AssemblyAI": JsonLines._assembly_ai,
    "segment": JsonLines._segment,
    "no speech": JsonLines._no_speech,
}


def _has_text(items: object, key: str) -> bool:
    """Whether it is a list whose first item is an object with such a text."""
    return bool(
        isinstance(items, list)
        and items
        and isinstance(items[0], dict)
        and isinstance(items[0].get(key), str)
    )


def _dicts(items: object) -> list[Message]:
    """The objects in a list; none where it is no list."""
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _turn_key(message: Message) -> Hashable:
    """What a turn and its formatted version share."""
    words = _dicts(message.get("words"))
    start = words[0].get("start") if words else None
    return "turn", str(message.get("turn_order")), str(start)


def _cues_of_words(best: Message, line: int, start: float | None, end: float | None) -> list[Cue]:
    """One cue, or where words have speakers, one for each of their turns."""
    text = best.get("transcript")
    words = _dicts(best.get("words"))
    spelt = [str(w.get("punctuated_word") or w.get("word") or "") for w in words]
    if not isinstance(text, str) or len(spelt) != len(text.split()):
        return _cue(text, line, {"start": start, "end": end})
    if all(_name(w.get("speaker")) is None for w in words):
        return _cue(text, line, {"start": start, "end": end})
    cues: list[Cue] = []
    pairs = zip(words, spelt, strict=True)
    for speaker, turn in groupby(pairs, key=lambda pair: _name(pair[0].get("speaker"))):
        said = list(turn)
        first, last = said[0][0].get("start"), said[-1][0].get("end")
        fields = {"start": first, "end": last, "speaker": speaker}
        cues += _cue(" ".join(word for _, word in said), line, fields)
    return cues


def _cue(text: object, line: int, fields: Message) -> list[Cue]:
    """A cue, or none where nothing was said."""
    words = _one_line(text) if isinstance(text, str) else ""
    if not words:
        return []
    start, end = _number(fields.get("start")), _number(fields.get("end"))
    return [Cue(words, line, line, start, end, _name(fields.get("speaker")))]


def _number(value: object) -> float | None:
    """Seconds, which WhisperLive writes as text, and WhisperLiveKit as a clock's time."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and IS_CLOCK.fullmatch(value):
        return seconds(value)
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return round(number, 3) if math.isfinite(number) else None


def _milliseconds(value: object) -> float | None:
    """Seconds of a number of milliseconds."""
    number = _number(value)
    return None if number is None else number / 1000


def _name(value: object) -> str | None:
    """A speaker's name or number."""
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        return None
    return _one_line(str(value))[:MAX_NAME_CHARS]


def _one_line(text: str) -> str:
    """Words in one line; JSON may hold half a character, which is none."""
    return " ".join(HALF_CHARACTER.sub("\ufffd", text).split())
