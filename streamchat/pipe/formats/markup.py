"""Tags, entities and voices in the text of captions."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

from streamchat.pipe.formats.speakers import take_speaker

TIME_TAG = re.compile(r"<[0-9:.,]{3,20}>")
VOICE = re.compile(r"<v(?:\.[^\s<>]*)?[ \t]+([^<>]{1,100})>|</(v)>", re.IGNORECASE)
TAG = re.compile(
    r"</?(?:[biusvc]|ruby|rt|lang|font)(?:[.\s][^<>]{0,200})?>|<[0-9:.,]{3,20}>|\{\\[^{}]{0,100}\}",
    re.IGNORECASE,
)
"""Those of WebVTT, SubRip's own, and the overrides that came to it from SSA. Others are text."""

NEW_VOICE = re.compile(r"[-\u2013\u2014>]")
"""A line of dialogue, of an unnamed speaker, begins with one of these."""


@dataclass(frozen=True, slots=True)
class Spoken:
    """What one speaker says in a cue.

    Attributes:
        text: Without tags.
        line: Number of the line that it begins in.
        last_line: Number of the line that it ends in.
        speaker: Who says it, or None.
        text_names_speaker: Whether the text begins with the name.
    """

    text: str
    line: int
    last_line: int
    speaker: str | None
    text_names_speaker: bool


def clean(text: str, *, has_entities: bool) -> str:
    """Words without tags, entities decoded, each space one."""
    text = TAG.sub("", text)
    return " ".join((html.unescape(text) if has_entities else text).split())


def spoken(lines: Sequence[tuple[int, str]], *, has_entities: bool) -> list[Spoken]:
    """What each speaker says in the lines of a cue; lines of white space say nothing.

    Args:
        lines: Number and text of each.
        has_entities: Whether `&amp;` stands for `&`.
    """
    found: list[Spoken] = []
    voice: str | None = None
    for line, raw in lines:
        begin = 0
        for match in VOICE.finditer(raw):
            _say(found, line, clean(raw[begin : match.start()], has_entities=has_entities), voice)
            voice = None if match[2] else clean(match[1], has_entities=has_entities) or None
            begin = match.end()
        _say(found, line, clean(raw[begin:], has_entities=has_entities), voice)
    return found


def _say(found: list[Spoken], line: int, text: str, voice: str | None) -> None:
    """Add words, to those before them if the same speaker goes on."""
    speaker, names = voice, False
    if voice is None:
        speaker, text, names = take_speaker(text)
    if not text:
        return
    before = found[-1] if found else None
    goes_on = voice is None and speaker is None and not NEW_VOICE.match(text)
    if before and (speaker == before.speaker or goes_on) and not names:
        found[-1] = Spoken(
            f"{before.text} {text}", before.line, line, before.speaker, before.text_names_speaker
        )
    else:
        found.append(Spoken(text, line, line, speaker, names))
