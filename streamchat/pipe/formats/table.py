"""All formats, by the names that `--format` takes."""

from collections.abc import Callable
from dataclasses import dataclass

from streamchat.pipe.formats.captions import Captions
from streamchat.pipe.formats.cue import Format
from streamchat.pipe.formats.json_lines import JsonLines
from streamchat.pipe.formats.plain import PlainText
from streamchat.pipe.formats.whisper import WhisperLines
from streamchat.pipe.formats.whisper_streaming import WhisperStreaming

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Entry:
    """A format.

    Attributes:
        title: What it is, and who writes it.
        make: Makes a reader of one input.
        known_by: How `auto` knows it.
        complete: When a cue is complete.
    """

    title: str
    make: Callable[[], Format]
    known_by: str
    complete: str


FORMATS: dict[str, Entry] = {
    "plain": Entry(
        "text and logs, each line as it is",
        PlainText,
        "what is nothing else",
        "at the end of its line",
    ),
    "srt": Entry(
        "SubRip subtitles",
        lambda: Captions(is_webvtt=False),
        "a number and a timing line, or a timing line with commas",
        "at the blank line behind it",
    ),
    "webvtt": Entry(
        "WebVTT captions: browsers, Teams, Zoom, YouTube",
        lambda: Captions(is_webvtt=True),
        "`WEBVTT`, or a timing line with points",
        "at the blank line behind it",
    ),
    "whisper.cpp": Entry(
        "`whisper-cli`, `whisper-stream`",
        WhisperLines,
        "a segment whose times have hours, `[Start speaking]`, `### Transcription`, erased lines",
        "at the end of its line",
    ),
    "whisper": Entry(
        "openai-whisper, whisperX, faster-whisper",
        WhisperLines,
        "a segment in brackets, `[SPEAKER_00]:`, `Detecting language …`",
        "at the end of its line",
    ),
    "whisper-streaming": Entry(
        "whisper_streaming",
        WhisperStreaming,
        "three times in milliseconds, the first with four decimals",
        "at the end of its line",
    ),
    "jsonl": Entry(
        "JSON lines: WhisperLive, Deepgram, AssemblyAI, or segments with `text` and `start`",
        JsonLines,
        "an object of one of these kinds",
        "at the end of the first line that has it in its final form",
    ),
}
