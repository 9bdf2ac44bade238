"""Readers of input formats: the words of the reference libraries, at once, and none lost.

The oracles are `srt`, `webvtt-py` and `pysubs2` on good files, which need the whole file, and the
plain script that a file was written from. Words of damaged files are numbered, so that one that is
lost, doubled or out of order shows.
"""

import html
import json
import re
from collections.abc import Callable
from dataclasses import dataclass

import pysubs2
import pytest
import srt
import webvtt
from hypothesis import given, settings
from hypothesis import strategies as st

from streamchat.pipe.formats.captions import MAX_LINES
from streamchat.pipe.formats.cue import Cue
from streamchat.pipe.formats.detect import guess
from streamchat.pipe.formats.markup import clean
from streamchat.pipe.formats.speakers import named_speaker, take_speaker
from streamchat.pipe.formats.table import FORMATS
from streamchat.pipe.formats.times import seconds


def feed(name, text):
    """Cues by the number of the line that was pushed when they came; 0 stands for the end."""
    reader, found = FORMATS[name].make(), []
    for number, line in enumerate(text.split("\n"), start=1):
        found += [(number, cue) for cue in reader.push(line, number)]
    return found + [(0, cue) for cue in reader.flush()]


def cues_of(name, text):
    return [cue for _, cue in feed(name, text)]


def texts_of(name, text):
    return [cue.text for cue in cues_of(name, text)]


def words_of(cues):
    return [cue.text.split() for cue in cues]


# Good files, against the reference libraries

WORD = st.text(st.characters(categories=["L", "N"], max_codepoint=0x2FFF), min_size=1, max_size=8)
PUNCTUATED = st.builds("{}{}".format, WORD, st.sampled_from(["", ",", ".", "?", "\u2026", "'s"]))
LINE = st.lists(PUNCTUATED, min_size=1, max_size=6).map(" ".join)
TIMES = st.lists(st.integers(0, 9 * 3600_000), min_size=2, max_size=2).map(sorted)


@dataclass
class Written:
    """A cue as a test writes it."""

    start: int
    end: int
    lines: list[str]
    voice: str | None = None


WRITTEN = st.builds(
    lambda times, lines, voice: Written(*times, lines, voice),
    TIMES,
    st.lists(LINE, min_size=1, max_size=3),
    st.none() | WORD,
)


def clock(milliseconds, mark):
    minutes, second = divmod(milliseconds // 1000, 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{second:02d}{mark}{milliseconds % 1000:03d}"


def as_srt(cues):
    return "".join(
        f"{number}\n{clock(cue.start, ',')} --> {clock(cue.end, ',')}\n"
        + "".join(f"{line}\n" for line in cue.lines)
        + "\n"
        for number, cue in enumerate(cues, start=1)
    )


def as_webvtt(cues, settings="", identifier="cue {}\n"):
    blocks = [
        "WEBVTT - a talk\nKind: captions\nLanguage: en\n\n",
        "STYLE\n::cue { color: red }\n\n",
    ]
    for number, cue in enumerate(cues, start=1):
        voice = "" if cue.voice is None else f"<v {cue.voice}>"
        text = "\n".join(html.escape(line, quote=False) for line in cue.lines)
        times = f"{clock(cue.start, '.')} --> {clock(cue.end, '.')}{settings}"
        blocks.append(f"{identifier.format(number)}{times}\n{voice}{text}\n\n")
        blocks.append(f"NOTE about cue {number}\nnot spoken\n\n")
    return "".join(blocks)


def are_ordinary(cues):
    """No line begins with a name, which would part a cue in two, and none comes twice."""
    lines = [line for cue in cues for line in cue.lines]
    return len(set(lines)) == len(lines) and not any(take_speaker(line)[0] for line in lines)


@given(st.lists(WRITTEN, max_size=6).filter(are_ordinary))
def test_srt_has_the_words_and_times_of_the_library(cues):
    """`srt`, on files of any letters, numbers and times."""
    text = as_srt(cues)
    ours = cues_of("srt", text)
    theirs = list(srt.parse(text))
    assert words_of(ours) == [sub.content.split() for sub in theirs]
    assert [(c.start, c.end) for c in ours] == [
        (sub.start.total_seconds(), sub.end.total_seconds()) for sub in theirs
    ]


def ends_in_letters(cues):
    return not any(re.search(r"\d\W*$", line) for cue in cues for line in cue.lines)


@given(st.lists(WRITTEN, max_size=6).filter(are_ordinary).filter(ends_in_letters))
def test_both_have_the_words_of_pysubs2(cues):
    """`pysubs2` for both; it takes numbers at the end of a text for those of the next cue."""
    for name, text in (("srt", as_srt(cues)), ("webvtt", as_srt(cues).replace(",", "."))):
        vtt = text if name == "srt" else f"WEBVTT\n\n{text}"
        events = pysubs2.SSAFile.from_string(vtt, format_="srt" if name == "srt" else "vtt")
        assert words_of(cues_of(name, vtt)) == [event.plaintext.split() for event in events]


@given(
    st.lists(WRITTEN, max_size=6).filter(are_ordinary),
    st.sampled_from(["", " align:start position:0%", " line:-1 size:50%"]),
    st.sampled_from(["", "{}\n", "part {} of it\n"]),
)
def test_webvtt_has_the_words_voices_and_times_of_the_library(cues, settings, identifier):
    """`webvtt-py`, with headers, styles, notes, identifiers and settings, which say nothing."""
    text = as_webvtt(cues, settings, identifier)
    ours, theirs = cues_of("webvtt", text), list(webvtt.from_string(text))
    assert words_of(ours) == [html.unescape(caption.text).split() for caption in theirs]
    assert [cue.speaker for cue in ours] == [caption.voice for caption in theirs]
    assert [(c.start, c.end) for c in ours] == [
        tuple(
            (t.hours * 3_600_000 + t.minutes * 60_000 + t.seconds * 1000 + t.milliseconds) / 1000
            for t in (caption.start_time, caption.end_time)
        )
        for caption in theirs
    ]


MARKED = [
    "<i>one</i> two",
    "<b><u>one</u></b> two",
    '<font color="#ff0000">one</font> two',
    "{\\an8}one two",
    "{\\i1}one{\\i0} two",
    "<s>one</s> two",
]


@pytest.mark.parametrize("marked", MARKED)
def test_tags_of_srt_are_gone(marked):
    """`pysubs2` agrees; what is no tag stays: it may have been said."""
    text = as_srt([Written(0, 1000, [marked])])
    (event,) = pysubs2.SSAFile.from_string(text, format_="srt")
    assert event.plaintext == "one two"
    assert texts_of("srt", text) == ["one two"]


@pytest.mark.parametrize(
    ("marked", "plain"),
    [
        ("<c.yellow.bg_blue>one</c> two", "one two"),
        ("one <00:00:00.500><c>two</c>", "one two"),
        ("<ruby>one<rt>two</rt></ruby>", "onetwo"),
        ("<lang en-GB>one</lang> <b.loud>two</b>", "one two"),
        ("1 &lt; 2 &amp;&amp; 3 &gt; 2", "1 < 2 && 3 > 2"),
        ("&gt;&gt; so&nbsp;it &#233;&#x301; is", ">> so it \xe9\u0301 is"),
        ("&lt;i&gt;one&lt;/i&gt;", "<i>one</i>"),
        ("a < b and b > c", "a < b and b > c"),
        ("<laughs> one <3 two", "<laughs> one <3 two"),
        ("one <i two", "one <i two"),
    ],
)
def test_tags_and_entities_of_webvtt(marked, plain):
    """Tags go before entities are decoded, and only tags go."""
    assert texts_of("webvtt", f"WEBVTT\n\n00:00.000 --> 00:01.000\n{marked}\n") == [plain]


def test_a_cue_with_several_voices_is_several():
    """Each voice's words by themselves, with their own lines and the same times."""
    text = (
        "WEBVTT\n\n00:01.000 --> 00:02.500\n<v Ann Lee>Shall we?</v> <v.loud Bob &amp; Co>Yes.\n"
        "Let us.\n\n00:03.000 --> 00:04.000\nNobody\n"
    )
    assert cues_of("webvtt", text) == [
        Cue("Shall we?", 4, 4, 1.0, 2.5, "Ann Lee"),
        Cue("Yes. Let us.", 4, 5, 1.0, 2.5, "Bob & Co"),
        Cue("Nobody", 8, 8, 3.0, 4.0),
    ]


def test_names_in_captions():
    """Zoom writes `Name:`, which stays in the text; whisperX writes a mark, which does not."""
    text = (
        "WEBVTT\n\n1\n00:01.000 --> 00:02.000\nAnn Lee: Hello.\nHow are you?\n\n"
        "2\n00:02.000 --> 00:03.000\n[SPEAKER_01]: Well.\n\n"
        "3\n00:03.000 --> 00:04.000\nAnn: Good.\n- And you?\n"
    )
    assert cues_of("webvtt", text) == [
        Cue("Ann Lee: Hello. How are you?", 5, 6, 1.0, 2.0, "Ann Lee", True),
        Cue("Well.", 10, 10, 2.0, 3.0, "SPEAKER_01"),
        Cue("Ann: Good.", 14, 14, 3.0, 4.0, "Ann", True),
        Cue("- And you?", 15, 15, 3.0, 4.0),
    ]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Ann: hello", "Ann"),
        ("Speaker 1: hello", "Speaker 1"),
        (">> DR. LEE: hello", "DR. LEE"),
        ("- Jean-Luc: hello", "Jean-Luc"),
        ("O\u2019Brien: hello", "O\u2019Brien"),
        ("\u738b\u4f1f\uff1a \u4f60\u597d", "\u738b\u4f1f"),
        ("\u00c9lise : bonjour", "\u00c9lise"),
        ("ERROR: disk full", None),
        ("Warning: disk full", None),
        ("Then he said: hello", None),
        ("ratio: 3", None),
        ("Ann:hello", None),
        ("Ann:", None),
        ("12: hello", None),
        ("A" * 60 + ": hello", None),
        ("", None),
    ],
)
def test_names(text, name):
    """A name is a few words with capitals before a colon and a space; levels of logs are none."""
    assert named_speaker(text) == name


# Rolling captions


def rolling_webvtt(script, *, held=0.01, blank=" "):
    """A script as YouTube shows it.

    Each line with the times of its words, below the line before; then held, for 10 ms mostly.
    """
    out, above, time = ["WEBVTT", "Kind: captions", "Language: en", ""], blank, 0.0
    for line in script:
        first, *rest = line.split()
        timed = "".join(
            f"<{clock(int(1000 * time) + 200 * i, '.')}><c> {word}</c>"
            for i, word in enumerate(rest, start=1)
        )
        stamps = [clock(round(1000 * t), ".") for t in (time, time + 2, time + 2 + held)]
        settings = "align:start position:0%"
        out += [f"{stamps[0]} --> {stamps[1]} {settings}", above, first + timed, ""]
        out += [f"{stamps[1]} --> {stamps[2]} {settings}", line, blank, ""]
        above, time = line, time + 2 + held
    return "\n".join(out)


SCRIPT = [
    "so we start with the plan",
    "yeah yeah",
    "yeah",
    "yeah",
    "&gt;&gt; that is what I said",
    "over &amp; out",
]


def test_each_line_of_rolling_captions_counts_once():
    """SP3: twelve cues, six lines; what was said twice is there twice. The script is the oracle."""
    text = rolling_webvtt(SCRIPT)
    assert text.count("-->") == 12
    assert texts_of("webvtt", text) == [html.unescape(line) for line in SCRIPT]


def test_rolling_captions_come_with_their_first_cue():
    """Each line comes with the blank line behind the first cue that shows it, and its number."""
    for index, (pushed, cue) in enumerate(feed("webvtt", rolling_webvtt(SCRIPT))):
        assert pushed == 8 * (index + 1)
        assert cue.line == cue.last_line == pushed - 1
        assert cue.start == pytest.approx(2.01 * index)


def test_rolling_captions_whose_white_space_was_stripped():
    """Without the space, the blank line ends the cue before its words: they are not lost."""
    text = rolling_webvtt(SCRIPT, blank="")
    assert texts_of("webvtt", text) == [html.unescape(line) for line in SCRIPT]


def rolling_srt(script):
    """The same as converters to SRT leave it: no tags, no settings, no blank line."""
    cues, above, time = [], [], 0
    for line in script:
        cues.append(Written(time, time + 2000, [*above, line]))
        cues.append(Written(time + 2000, time + 2010, [line]))
        above, time = [line], time + 2010
    return as_srt(cues)


def test_rolling_captions_as_srt():
    """The cue of 10 ms gives them away."""
    script = ["so we start", "yeah", "yeah", "and go on", "to the end"]
    assert texts_of("srt", rolling_srt(script)) == script


def test_a_line_that_is_held_for_long_counts_once():
    """While nobody speaks, the last line stays, above an empty one, longer than 10 ms."""
    text = rolling_webvtt(SCRIPT, held=1.5)
    assert texts_of("webvtt", text) == [html.unescape(line) for line in SCRIPT]


def test_captions_that_roll_without_a_hold():
    """Live captions of two lines: the second roll in a row shows it, and none is lost before.

    What is said three times counts three times.
    """
    script = ["line 0", "line 1", "line 2", "yeah", "yeah", "yeah", "line 6"]
    cues = [Written(0, 1000, script[:1])]
    cues += [Written(1000 * i, 1000 * i + 1000, script[i - 1 : i + 1]) for i in range(1, 7)]
    assert texts_of("webvtt", as_webvtt(cues)) == ["line 0", "line 0 line 1", *script[2:]]


def test_a_true_repetition_in_ordinary_captions_is_kept():
    """Two cues that say the same, one behind the other, in a file that does not roll."""
    cues = [
        Written(0, 1000, ["No."]),
        Written(1000, 2000, ["No."]),
        Written(2000, 3000, ["No.", "Never."]),
        Written(3000, 4000, ["Never."]),
        Written(4000, 5000, ["Never.", "Ever."]),
    ]
    cues += [Written(5000, 5000, ["Oh."]), Written(5000, 5000, ["Oh."])]  # times that are broken
    expected = ["No.", "No.", "No. Never.", "Never.", "Never. Ever.", "Oh.", "Oh."]
    assert texts_of("srt", as_srt(cues)) == expected
    assert texts_of("webvtt", as_webvtt(cues)) == expected


# Whisper programs

ERASED = "\x1b[2K\r" + " " * 100 + "\x1b[2K\r"


def test_whisper_cpp_steps_count_once():
    """`whisper-stream` writes over its line until it breaks it: only the last text counts."""
    text = (
        f"[Start speaking]\n{ERASED} And{ERASED} And so my{ERASED} And so my fellow\n{ERASED} ask"
    )
    assert cues_of("whisper.cpp", text) == [Cue("And so my fellow", 2, 2), Cue("ask", 3, 3)]


def test_a_line_that_was_erased_at_its_end_keeps_its_last_words():
    """A last hypothesis that was erased by nothing may be all that was heard."""
    assert texts_of("whisper.cpp", f"{ERASED} And so{ERASED}\n") == ["And so"]


def test_whisper_cpp_blocks_have_times_from_the_start():
    """With `--step 0` times count from the start of a block; marks and silence are no words."""
    text = """[Start speaking]

### Transcription 0 START | t0 = 1500 ms | t1 = 6500 ms

[00:00:00.000 --> 00:00:02.250]   Hello there. [SPEAKER_TURN]
[00:00:02.250 --> 00:00:05.000]   Hello.

### Transcription 0 END

### Transcription 1 START | t0 = 61000 ms | t1 = 66000 ms

[00:00:00.000 --> 00:00:05.000]   [BLANK_AUDIO]
 no times here
### Transcription 1 END
[00:00:00.000 --> 00:00:05.000]   (speaker 1) outside
"""
    assert cues_of("whisper.cpp", text) == [
        Cue("Hello there.", 5, 5, 1.5, 3.75, turn=1),
        Cue("Hello.", 6, 6, 3.75, 6.5, turn=2),
        Cue("no times here", 13, 13, 61.0, 66.0, turn=2),
        Cue("outside", 15, 15, 0.0, 5.0, "speaker 1", turn=2),
    ]


@pytest.mark.parametrize(
    ("line", "cue"),
    [
        ("[00:01.500 --> 00:05.000]  Hello.", Cue("Hello.", 1, 1, 1.5, 5.0)),
        ("[01:00:01.500 --> 01:00:05.000] Hello.", Cue("Hello.", 1, 1, 3601.5, 3605.0)),
        ("Transcript: [0.031 --> 27.5]  Hello.", Cue("Hello.", 1, 1, 0.031, 27.5)),
        ("[0.00s -> 2.50s]  Hello.", Cue("Hello.", 1, 1, 0.0, 2.5)),
        ("[SPEAKER_00]: Hello.", Cue("Hello.", 1, 1, None, None, "SPEAKER_00")),
        (
            "[00:01.000 --> 00:02.000] [SPEAKER_01]: Hi.",
            Cue("Hi.", 1, 1, 1.0, 2.0, "SPEAKER_01"),
        ),
        ("\x1b[38;5;82mHello\x1b[0m there", Cue("Hello there", 1, 1)),
        ("[00:01.500 -- 00:05.000] broken", Cue("[00:01.500 -- 00:05.000] broken", 1, 1)),
    ],
)
def test_lines_of_whisper_programs(line, cue):
    """openai-whisper, whisperX, what users of faster-whisper print, colours, and broken times."""
    assert feed("whisper", line) == [(1, cue)]


def test_what_whisper_says_before_it_hears_is_not_speech():
    """Only before: later the same words may have been said."""
    text = (
        "Detecting language using up to the first 30 seconds. Use `--language` to say so\n"
        "Detected language: English\n[00:00.000 --> 00:01.000]  one\nDetected language: English\n"
    )
    assert texts_of("whisper", text) == ["one", "Detected language: English"]


def test_lines_of_whisper_streaming():
    """With and without the time of emission; what is no such line passes whole."""
    text = "2691.4399 300 1380 Chairman, thank you.\n1380 2000  If \nbroken 1 2\n9.0 30 20 back\n"
    assert cues_of("whisper-streaming", text) == [
        Cue("Chairman, thank you.", 1, 1, 0.3, 1.38),
        Cue("If", 2, 2, 1.38, 2.0),
        Cue("broken 1 2", 3, 3),
        Cue("9.0 30 20 back", 4, 4),
    ]


# JSON lines


def lines_of(*messages):
    return "\n".join(json.dumps(message) for message in messages) + "\n"


def live(*segments):
    return {"uid": "a", "segments": [dict(zip(FIELDS, s, strict=True)) for s in segments]}


FIELDS = ("start", "end", "text", "completed")


def test_whisper_live_segments_count_once_and_when_complete():
    """Each message repeats the last segments; the newest changes until it is completed."""
    text = lines_of(
        {"uid": "a", "message": "SERVER_READY", "backend": "faster_whisper"},
        live(("0.000", "1.0", " so", False)),
        live(("0.000", "2.0", " so we", True), ("2.000", "3.0", " yeah", False)),
        live(("0.000", "2.0", " so we", True), ("2.000", "3.0", " yeah", True)),
        live(("2.000", "3.0", " yeah", True), ("3.000", "4.0", " yeah", True)),
        live(("3.000", "4.0", " yeah", True), ("4.000", "5.0", " and", False)),
    )
    assert feed("jsonl", text) == [
        (3, Cue("so we", 3, 3, 0.0, 2.0)),
        (4, Cue("yeah", 4, 4, 2.0, 3.0)),
        (5, Cue("yeah", 5, 5, 3.0, 4.0)),
        (0, Cue("and", 6, 6, 4.0, 5.0)),
    ]


def test_whisper_live_before_it_said_what_is_complete():
    """Without `completed`, all but the newest are."""
    segments = [{"start": i, "end": i + 1, "text": f"w{i}"} for i in range(4)]
    text = lines_of(*({"uid": "a", "segments": segments[: i + 1]} for i in range(4)))
    assert [(n, c.text) for n, c in feed("jsonl", text)] == [
        (2, "w0"),
        (3, "w1"),
        (4, "w2"),
        (0, "w3"),
    ]


def heard(text, start, duration, **fields):
    return {
        "type": "Results",
        "channel_index": [0, 1],
        "start": start,
        "duration": duration,
        "channel": {"alternatives": [{"transcript": text, **fields.pop("best", {})}]},
        **fields,
    }


def test_deepgram_finals():
    """Hypotheses are replaced by finals; the last one is given when nothing replaced it."""
    text = lines_of(
        {"type": "Metadata", "request_id": "x"},
        heard("so", 0.0, 1.0, is_final=False),
        heard("so we", 0.0, 1.5, is_final=True),
        heard("", 1.5, 1.0, is_final=True),
        heard("lost", 2.5, 1.0, is_final=False),
        heard("yeah", 3.5, 0.5, is_final=True, speech_final=True),
        {"type": "UtteranceEnd", "last_word_end": 4.0},
        heard("and", 4.0, 0.5, is_final=False),
    )
    assert feed("jsonl", text) == [
        (3, Cue("so we", 3, 3, 0.0, 1.5)),
        (6, Cue("lost", 5, 5, 2.5, 3.5)),  # its final never came
        (6, Cue("yeah", 6, 6, 3.5, 4.0)),
        (0, Cue("and", 8, 8, 4.0, 4.5)),
    ]


def test_deepgram_speakers():
    """Where words have speakers, each turn is a cue; a list that is not whole does not count."""
    words = [
        {"word": "so", "punctuated_word": "So,", "start": 0.0, "end": 0.4, "speaker": 0},
        {"word": "yes", "punctuated_word": "yes.", "start": 0.4, "end": 0.8, "speaker": 0},
        {"word": "no", "punctuated_word": "No.", "start": 0.8, "end": 1.0, "speaker": 1},
    ]
    whole = heard("So, yes. No.", 0.0, 1.0, is_final=True, best={"words": words})
    part = heard("So, yes. No.", 1.0, 1.0, is_final=True, best={"words": words[:2]})
    assert cues_of("jsonl", lines_of(whole, part)) == [
        Cue("So, yes.", 1, 1, 0.0, 0.8, "0"),
        Cue("No.", 1, 1, 0.8, 1.0, "1"),
        Cue("So, yes. No.", 2, 2, 1.0, 2.0),
    ]


def turn(order, text, *, end, formatted=None, start=1000, **fields):
    message = {"type": "Turn", "turn_order": order, "end_of_turn": end, "transcript": text}
    words = [{"text": w, "start": start, "end": start + 500} for w in text.split()]
    if formatted is not None:
        message["turn_is_formatted"] = formatted
    return {**message, "words": words, **fields}


def test_assembly_ai_turns_count_once():
    """A finished turn may come again, formatted, and then counts in that form."""
    text = lines_of(
        {"type": "Begin", "id": "x", "expires_at": 1},
        turn(0, "so", end=False, formatted=False),
        turn(0, "so we start", end=True, formatted=False),
        turn(0, "So we start.", end=True, formatted=True, speaker_label="A"),
        turn(1, "yeah", end=True, formatted=False, start=3000),
        turn(2, "yeah", end=True, start=5000),
        turn(3, "and", end=False, start=7000),
        {"type": "Termination", "session_duration_seconds": 9},
    )
    assert feed("jsonl", text) == [
        (4, Cue("So we start.", 4, 4, 1.0, 1.5, "A")),
        (6, Cue("yeah", 5, 5, 3.0, 3.5)),
        (6, Cue("yeah", 6, 6, 5.0, 5.5)),
        (0, Cue("and", 7, 7, 7.0, 7.5)),
    ]


def test_a_pause_ends_the_wait_for_the_formatted_turn():
    """After a pause a finished turn is given as it is; formatted, it does not count again."""
    reader = FORMATS["jsonl"].make()
    first, second = (
        lines_of(turn(0, text, end=True, formatted=formatted)).strip()
        for text, formatted in (("so we", False), ("So we.", True))
    )
    assert reader.push(first, 1) == []
    assert [cue.text for cue in reader.pause()] == ["so we"]
    assert reader.push(second, 2) == []
    assert reader.flush() == []


def test_segments_and_other_json():
    """Objects with text and a start are segments; others are text, as they are."""
    text = lines_of(
        {"start": 0, "end": 1.5, "text": "so  we", "speaker": "Ann"},
        {"start": 1.5, "text": "start", "is_final": False},
        {"start": 1.5, "text": "started"},
    )
    text += '{"level": "info", "text": "x"}\nnot json\n{"broken": \n\n'
    assert cues_of("jsonl", text) == [
        Cue("so we", 1, 1, 0.0, 1.5, "Ann"),
        Cue("started", 3, 3, 1.5),
        Cue('{"level": "info", "text": "x"}', 4, 4),
        Cue("not json", 5, 5),
        Cue('{"broken":', 6, 6),
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
KEYS = st.sampled_from(
    [
        *("type", "uid", "message", "segments", "text", "start", "end", "completed", "speaker"),
        *("channel", "alternatives", "transcript", "words", "duration", "is_final"),
        *("end_of_turn", "turn_order", "turn_is_formatted", "punctuated_word"),
    ]
)
MESSAGE = st.recursive(
    JSON,
    lambda inner: st.dictionaries(KEYS, inner, max_size=6) | st.lists(inner, max_size=2),
    max_leaves=12,
)


@settings(max_examples=50)
@given(st.lists(st.dictionaries(KEYS, MESSAGE, max_size=8), max_size=6))
def test_any_json_is_read(messages):
    """Fields of any type raise nothing; what comes can be written as UTF-8 and as strict JSON."""
    for cue in cues_of("jsonl", lines_of(*messages)):
        assert cue.text.strip()
        cue.text.encode()
        json.dumps([cue.start, cue.end, cue.speaker], allow_nan=False).encode()


def test_half_a_character_is_none():
    """SP1: a lone surrogate, which JSON can hold, would break a tokenizer."""
    assert texts_of("jsonl", '{"start": 0, "text": "a \\ud83d b \\ud83d\\ude00"}') == [
        "a \ufffd b \U0001f600"
    ]


# Plain text


@pytest.mark.parametrize(
    ("line", "start", "speaker"),
    [
        ("no time", None, None),
        ("[0:12:34] Ann: hello", 754.0, "Ann"),
        ("(12:34) hello", 754.0, None),
        ("12:34 hello", None, None),
        ("12:34:56.5 hello", 45296.5, None),
        ("2026-01-31T10:20:30Z ERROR: disk", 37230.0, None),
        ("2026-01-31 10:20:30,250 Ann: hi", 37230.25, "Ann"),
        ("Jan 31 10:20:30 host kernel: up", 37230.0, None),
        ("2026-99-31 10:20:30 x", None, None),
        ("  Ann: hi", None, "Ann"),
        ("", None, None),
    ],
)
def test_times_and_names_in_plain_text(line, start, speaker):
    """They are found where they stand in front, and the line stays as it is."""
    assert cues_of("plain", line) == [
        Cue(line, 1, 1, start, None, speaker, speaker is not None),
    ]


def test_times_of_day_go_on_after_midnight():
    """Dates count days; without one, a fall of more than half a day is a new day."""
    dated = "2026-01-31 23:59:59 a\n2026-02-01 00:00:01 b\n2026-02-03 00:00:00 c"
    assert [c.start for c in cues_of("plain", dated)] == [86399.0, 86401.0, 259200.0]
    plain = "23:59:59 a\n00:00:01 b\n12:00:00 c\n11:59:00 d\n23:00:00 e\n01:00:00 f"
    starts = [c.start for c in cues_of("plain", plain)]
    assert starts == [86399.0, 86401.0, 129600.0, 129540.0, 169200.0, 176400.0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1:02:03.5", 3723.5), ("02:03,250", 123.25), ("61:00", 3660.0), ("7.125", 7.125)],
)
def test_seconds(text, expected):
    """Points and commas, with and without hours."""
    assert seconds(text) == expected


# As soon as it is complete

SAMPLES = {
    "plain": ["one", "two", "three"],
    "srt": as_srt([Written(i * 1000, i * 1000 + 900, [f"c{i}", "more"]) for i in range(4)]),
    "webvtt": as_webvtt([Written(i * 1000, i * 1000 + 900, [f"c{i}"]) for i in range(4)]),
    "whisper.cpp": [f"[00:00:0{i}.000 --> 00:00:0{i + 1}.000]   c{i}" for i in range(4)],
    "whisper": [f"[00:0{i}.000 --> 00:0{i + 1}.000]  c{i}" for i in range(4)],
    "whisper-streaming": [f"{i}.5000 {i} {i + 1} c{i}" for i in range(4)],
    "jsonl": [f'{{"start": {i}, "text": "c{i}"}}' for i in range(4)],
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_cue_comes_as_soon_as_it_is_complete(name):
    """Each with the line that ends it: its own, or in captions the blank one behind it."""
    sample = SAMPLES[name]
    text = sample if isinstance(sample, str) else "\n".join(sample)
    delay = 1 if name in ("srt", "webvtt") else 0
    found = feed(name, text)
    assert len(found) == (3 if name == "plain" else 4)
    assert all(pushed == cue.last_line + delay for pushed, cue in found)


@pytest.mark.parametrize("name", ["srt", "webvtt"])
def test_a_cue_without_a_blank_line_comes_with_the_next_timing(name):
    """The number above the next timing line is not of its text; a spoken number is."""
    spoken = ["one\n7", "two", "three\n9"]
    text = ("WEBVTT\n\n" if name == "webvtt" else "") + "".join(
        f"{i}\n00:00:0{i}.000 --> 00:00:0{i}.900\n{said}\n" for i, said in enumerate(spoken, 1)
    )
    found = feed(name, text)
    assert [cue.text for _, cue in found] == ["one 7", "two", "three 9"]
    assert [pushed - cue.last_line for pushed, cue in found[:-1]] == [2, 2]


def test_a_number_that_is_no_cue_s_is_spoken():
    """Above a timing line, without a blank one, only the number that is next is not text."""
    text = "  \n5\n00:00:01,000 --> 00:00:02,000\nnow\n7\n00:00:02,000 --> 00:00:03,000\n8\n"
    assert texts_of("srt", text) == ["now 7", "8"]


@pytest.mark.parametrize("name", ["srt", "webvtt"])
def test_text_without_blank_lines_does_not_wait_for_ever(name):
    """Lines that no blank line ends come all the same, so many at a time, with the last times."""
    lines = [f"w{i}" for i in range(3 * MAX_LINES)]
    found = feed(name, "\n".join(["00:00:01.000 --> 00:00:02.000", *lines]))
    assert " ".join(cue.text for _, cue in found).split() == lines
    assert all(pushed - cue.line < MAX_LINES for pushed, cue in found)
    assert {(cue.start, cue.end) for _, cue in found} == {(1.0, 2.0)}


def test_a_pause_completes_a_cue():
    """Text that came is given after a pause; more of the cue has the same times, a number waits."""
    reader = FORMATS["srt"].make()
    for number, line in enumerate(["1", "00:00:01,000 --> 00:00:02,000", "one"], start=1):
        assert reader.push(line, number) == []
        if number == 1:
            assert reader.pause() == []
    assert reader.pause() == [Cue("one", 3, 3, 1.0, 2.0)]
    assert reader.pause() == []
    assert reader.push("two", 4) == []
    assert reader.push("", 5) == [Cue("two", 4, 4, 1.0, 2.0)]
    assert reader.push("2", 6) == reader.pause() == []
    assert reader.flush() == [Cue("2", 6, 6, 1.0, 2.0)]


# Damage


def transcript(name):
    """Lines of a good file in a format, whose spoken words are w0, w1 and so on."""
    count = iter(range(1000))

    def words(num):
        return " ".join(f"w{next(count)}" for _ in range(num))

    if name in ("srt", "webvtt"):
        cues = [
            Written(i * 2000, i * 2000 + 1900, [words(3) for _ in range(1 + i % 2)])
            for i in range(6)
        ]
        return (as_srt(cues) if name == "srt" else as_webvtt(cues, identifier="")).split("\n")
    make: dict[str, Callable[[int], str]] = {
        "plain": lambda i: f"[00:0{i}] Ann: {words(4)}",
        "whisper.cpp": lambda i: f"[00:00:0{i}.000 --> 00:00:0{i + 1}.000]   {words(4)}",
        "whisper": lambda i: f"[00:0{i}.000 --> 00:0{i + 1}.000]  [SPEAKER_0{i}]: {words(4)}",
        "whisper-streaming": lambda i: f"{i}00.2500 {i}000 {i + 1}000 {words(4)}",
        "jsonl": lambda i: json.dumps({"start": i, "end": i + 1, "text": words(4)}),
    }
    return [make[name](i) for i in range(8)]


def at(lines, pattern):
    """The index of the second line that matches."""
    return [i for i, line in enumerate(lines) if re.search(pattern, line)][1]


def edit(pattern, change):
    """Damage of one line: the second that matches."""

    def damage(lines):
        index = at(lines, pattern) if any(re.search(pattern, line) for line in lines) else 0
        return [*lines[:index], *change(lines[index]), *lines[index + 1 :]]

    return damage


WORDS = r"w\d+ w\d+"
ARROW = "-->"

DAMAGE = {
    "no blank line": edit("^$", lambda line: []),
    "two blank lines": edit("^$", lambda line: [line, ""]),
    "more blank lines, of spaces": edit("^$", lambda line: ["", "  ", " \t"]),
    "blank lines of spaces": lambda lines: [line or "  " for line in lines],
    "a blank line before the text": edit(WORDS, lambda line: ["", line]),
    "no blank lines at all": lambda lines: [line for line in lines if line],
    "no timing line": edit(ARROW, lambda line: []),
    "no numbers": lambda lines: [line for line in lines if not line.isdigit()],
    "numbers twice": lambda lines: [x for line in lines for x in [line] * (1 + line.isdigit())],
    "another arrow": edit(ARROW, lambda line: [line.replace("-->", "->")]),
    "no fraction": edit(ARROW, lambda line: [re.sub(r"[.,]\d+", "", line)]),
    "an end before the start": edit(ARROW, lambda line: [line.replace(":0", ":5", 1)]),
    "a broken time": edit(ARROW, lambda line: [line.replace(":", ";", 1)]),
    "times alone": edit(WORDS, lambda line: [re.sub(WORDS + ".*", "", line), line]),
    "white space around": lambda lines: [f" \t{line} \t" if line else line for line in lines],
    "cut off at the end": lambda lines: [*lines[:-6], lines[-6][: len(lines[-6]) // 2]],
    "cut off at the start": lambda lines: [lines[2][3:], *lines[3:]],
    "a line of something else": edit(WORDS, lambda line: ["%% w900 %%", line]),
    "something else at the start": lambda lines: ["-- w901 --", "", *lines],
    "an open tag": edit(WORDS, lambda line: [line.replace(" w", " <i w", 1)]),
    "an open brace": edit(WORDS, lambda line: [line.replace(" w", " {\\ w", 1)]),
    "a tag that is none": edit(WORDS, lambda line: [line.replace(" w", " <w", 1) + ">"]),
    "NUL": edit(WORDS, lambda line: [line.replace(" w", " \x00 w", 1)]),
    "carriage returns": edit(WORDS, lambda line: [line + "\r"]),
    "a line twice": edit(WORDS, lambda line: [line, line]),
    "the file twice": lambda lines: [*lines, "", *lines],
    "half the line": edit(WORDS, lambda line: [line[: len(line) // 2], line[len(line) // 2 :]]),
    "replacement characters": edit(WORDS, lambda line: [line.replace(" w", " \ufffd w", 1)]),
    "brackets": edit(WORDS, lambda line: ["]][[ --> ", line]),
    "control characters": edit(WORDS, lambda line: ["\x07\x1b", line]),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("name", FORMATS)
def test_no_word_is_lost_in_damage(name, damage):
    """Every word that the damaged file still has comes out, in order; none is made up."""
    lines = damage(transcript(name))
    expected = re.findall(r"w\d+", "\n".join(lines))
    assert len(expected) >= 8
    found = re.findall(r"w\d+", " ".join(texts_of(name, "\n".join(lines))))
    assert found == expected


@given(st.sampled_from(sorted(FORMATS)), st.data())
def test_no_word_is_lost_wherever_a_line_is_lost(name, data):
    """Any one line deleted, doubled or broken in two, in any format."""
    lines = transcript(name)
    index = data.draw(st.integers(0, len(lines) - 1))
    line = lines[index]
    cut = data.draw(st.integers(0, len(line)))
    change = data.draw(st.sampled_from([[], [line, line], [line[:cut], line[cut:]], [line[:cut]]]))
    text = "\n".join([*lines[:index], *change, *lines[index + 1 :]])
    found = re.findall(r"w\d+", " ".join(texts_of(name, text)))
    assert found == re.findall(r"w\d+", text)


@given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(
        st.text(max_size=8)
        | st.sampled_from(
            [
                *("", " ", "1", "00:00:01.000 --> 00:00:02.000", "WEBVTT", "<v A>x", "{"),
                *("[00:01.000 --> 00:02.000] x", "### Transcription 1 START", "&#xD800;"),
                *("STYLE", "\x1b[2K\rx"),
            ]
        ),
        max_size=12,
    ),
)
def test_any_lines_are_read(name, lines):
    """No line raises; texts are one line each, with words, unless they are plain lines."""
    for line in lines:
        clean(line, has_entities=True).encode("utf-8", "surrogatepass")
    for cue in cues_of(name, "\n".join(lines).replace("\r\n", "\n")):
        assert cue.line <= cue.last_line
        if name != "plain":
            assert cue.text.strip()
            assert "\n" not in cue.text


# Which format it is


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        (["WEBVTT"], "webvtt"),
        (["WEBVTT - a talk"], "webvtt"),
        (["WEBVTTX"], "plain"),
        (["00:00.000 --> 00:01.000 line:0"], "webvtt"),
        (["00:00:00,000 --> 00:00:01,000"], "srt"),
        (["1"], None),
        (["1", "00:00:00,000 --> 00:00:01,000"], "srt"),
        (["1", "2"], "plain"),
        (["[Start speaking]"], "whisper.cpp"),
        ([f"{ERASED} Hello"], "whisper.cpp"),
        (["### Transcription 0 START | t0 = 0 ms | t1 = 3371 ms"], "whisper.cpp"),
        (["[00:00:00.000 --> 00:00:05.000]   Hello"], "whisper.cpp"),
        (["[00:00.000 --> 00:05.000]  Hello"], "whisper"),
        (["[0.00s -> 2.50s] Hello"], "whisper"),
        (["Transcript: [0.0 --> 2.5] Hello"], "whisper"),
        (["[SPEAKER_00]: Hello"], "whisper"),
        (["Detecting language using up to the first 30 seconds."], "whisper"),
        (["2691.4399 300 1380 Chairman"], "whisper-streaming"),
        (["200 10 20 bytes"], "plain"),
        (['{"uid": "a", "segments": []}'], "jsonl"),
        (['{"uid": "a", "message": "SERVER_READY"}'], "jsonl"),
        (['{"type": "Begin", "id": "x", "expires_at": 1}'], "jsonl"),
        (['{"start": 0.5, "text": "Hello"}'], "jsonl"),
        (['{"uid": "pod-1", "message": "restarted"}'], "plain"),
        (['{"type": "Begin", "text": "x"}'], "plain"),
        (['{"level": "info"}'], "plain"),
        (["{not json"], "plain"),
        (["[2026-01-31] [info] started"], "plain"),
        (["Ann: hello"], "plain"),
    ],
)
def test_the_first_lines_say_which_format_it_is(lines, name):
    """What is not surely something else is plain text: logs, lists of numbers, other JSON."""
    assert guess(lines, is_whole=True) == name


def test_a_line_that_goes_on_is_judged_by_its_beginning():
    """Only what may be a JSON object needs its end."""
    assert guess(['{"uid"'], is_whole=False) is None
    assert guess(["12345"], is_whole=False) == "plain"
    assert guess(["[00:00:00.000 --> 00:00:05.000]"], is_whole=False) == "whisper.cpp"


@pytest.mark.parametrize("name", FORMATS)
def test_a_good_file_is_known_by_its_first_lines(name):
    """The samples of the tests above, by two lines at most."""
    lines = [line for line in transcript(name) if line]
    decided = guess(lines[:1], is_whole=True) or guess(lines[:2], is_whole=True)
    assert decided == name
