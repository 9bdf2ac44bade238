"""Write docs/formats.md from the code: the formats that `streamchat pipe` reads.

    python docs/formats.py            # write
    python docs/formats.py --check    # say whether it is out of date, and exit with 1 if so

Formats come from `streamchat/pipe/formats/table.py`. What each sample below becomes is not written
down: the readers are run.
"""

from pathlib import Path

import pages

from streamchat.pipe.formats.cue import Cue
from streamchat.pipe.formats.table import FORMATS

PAGE = Path(__file__).parent / "formats.md"

SAMPLES = {
    "plain": "[0:12:34] Ann: The launch is on Friday.\n2026-01-31 10:20:30 ERROR: disk full\n",
    "srt": "1\n00:00:01,000 --> 00:00:03,500\n<i>The launch</i>\nis on Friday.\n\n",
    "webvtt": (
        "WEBVTT\n\nNOTE not spoken\n\n"
        "00:01.000 --> 00:03.500 align:start\n<v Ann>The launch is on Friday.\n\n"
        "00:03.500 --> 00:05.000\n<v Bob>At ten &amp; not later.\n\n"
    ),
    "whisper.cpp": (
        "### Transcription 4 START | t0 = 60000 ms | t1 = 65000 ms\n\n"
        "[00:00:00.000 --> 00:00:02.500]   The launch is on Friday. [SPEAKER_TURN]\n"
        "[00:00:02.500 --> 00:00:04.000]   At ten.\n\n"
        "### Transcription 4 END\n"
    ),
    "whisper": (
        "[00:00.000 --> 00:02.500]  The launch is on Friday.\n[SPEAKER_01]: At ten.\n"
        "[4.00s -> 5.50s] And not later.\n"
    ),
    "whisper-streaming": "2691.4399 300 2500 The launch is\n3840.1200 2500 3300 on Friday.\n",
    "jsonl": (
        '{"uid": "a", "segments": [{"start": "0.0", "end": "2.5", "text": " The launch is on '
        'Friday.", "completed": true}]}\n'
        '{"type": "Results", "is_final": true, "start": 2.5, "duration": 1.5, '
        '"channel": {"alternatives": [{"transcript": "At ten."}]}}\n'
        '{"type": "Turn", "turn_order": 0, "end_of_turn": false, "transcript": "And"}\n'
        '{"type": "Turn", "turn_order": 0, "end_of_turn": true, "transcript": "And not later."}\n'
        '{"start": 8, "end": 9, "text": "Good.", "speaker": "Ann"}\n'
    ),
}

RULES = """\
`streamchat pipe` reads its input line by line and does not wait for the end: words are fed to the
model as soon as the table says that they are complete. A cue of SRT or WebVTT whose blank line does
not come is complete after half a second without input.

`--format auto`, the default, decides by the first line that is not blank, or by the first two, for
each FILE by itself, and says on standard error what it found (`streamchat: input webvtt (auto)`).
Where it finds nothing, or half a second passes without input, it is plain text. `--format NAME`
skips that.

* What a reader does not know passes as text; damage loses no words.
* Times are seconds, from the start of the recording. In plain text, a time of day counts from the
  midnight before the first line. In `--json` they are `start` and `end`; a note has those of what
  it covers.
* A speaker is `speaker` in `--json`. The model reads `Ann: ` in front of the text where the text
  does not begin with the name itself. In plain text and captions, one to four words with capitals
  before a colon are a name.
* `turn` numbers the turns where an input marks them without a name, as whisper.cpp's
  `[SPEAKER_TURN]` does: `--by turn` and `--on-turn` go by it.
* `line` is the number of the line that the words begin in, `last_line` of the one that they end in,
  if it is another one. With several FILEs lines are numbered through, and `file` and `file_line`
  say where a line stands.
* Captions that roll, as YouTube's do, repeat each line two or three times: it counts once. What was
  said twice counts twice.
* Hypotheses of live speech recognition do not count, finals do; a last hypothesis that nothing
  replaced counts when the input ends.
* `[BLANK_AUDIO]`, lines that were overwritten, comments, styles and cue settings are no words.
"""


def page() -> str:
    """The text of docs/formats.md."""
    return "\n".join(
        [
            "# Input formats",
            "",
            "Made by `python docs/formats.py` from `streamchat/pipe/formats/`.",
            "",
            RULES,
            "| `--format` | what it is | `auto` knows it by | a cue is complete |",
            "| --- | --- | --- | --- |",
            *(
                f"| `{name}` | {entry.title} | {entry.known_by} | {entry.complete} |"
                for name, entry in FORMATS.items()
            ),
            "",
            *(line for name in FORMATS for line in section(name)),
        ]
    )


def section(name: str) -> list[str]:
    """A sample of a format, and what its reader makes of it."""
    return [
        f"## {name}",
        "",
        "```text",
        *SAMPLES[name].rstrip("\n").split("\n"),
        "```",
        "",
        "| line | start | end | speaker | text |",
        "| ---: | ---: | ---: | --- | --- |",
        *(row(cue) for cue in cues(name)),
        "",
    ]


def cues(name: str) -> list[Cue]:
    """What the reader of a format makes of its sample."""
    reader = FORMATS[name].make()
    found: list[Cue] = []
    for number, line in enumerate(SAMPLES[name].split("\n")[:-1], start=1):
        found += reader.push(line, number)
    return found + reader.flush()


def row(cue: Cue) -> str:
    """A cue as a row of the table."""
    lines = str(cue.line) if cue.line == cue.last_line else f"{cue.line}-{cue.last_line}"
    start, end = ("" if time is None else f"{time:g}" for time in (cue.start, cue.end))
    return f"| {lines} | {start} | {end} | {cue.speaker or ''} | {cue.text} |"


def wanted() -> dict[Path, str]:
    """What the file should hold."""
    return {PAGE: page()}


def main() -> None:
    pages.run(__file__, __doc__, wanted)


if __name__ == "__main__":
    main()
