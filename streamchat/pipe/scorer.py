"""Scores of lines beside what is usual, all of them or those that stand out."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from streamchat.engine.stream import Stream
from streamchat.events import LineScored, Origin, Progress
from streamchat.pipe.place import Place
from streamchat.pipe.reader import Reader
from streamchat.pipe.score import score
from streamchat.pipe.surprise import RunningMean, Threshold
from streamchat.pipe.turns import MAX_TURN_CHARS


class Scorer:
    """Scores lines, and lets all of them pass or those that stand out.

    Args:
        stream: Fed with the lines.
        threshold: What passes, whole lines then; None for everything, long lines in parts.
    """

    def __init__(self, stream: Stream, threshold: Threshold | None = None) -> None:
        self.stream = stream
        self._threshold = threshold
        self._usual = RunningMean()
        # Parts of a long line, until it is known whether it passes.
        self._waiting: list[LineScored] = []

    def run(
        self, reader: Reader, should_stop: Callable[[], bool], place: Place | None = None
    ) -> Iterator[LineScored | Progress]:
        """As `score`, each line with its standard score, what does not pass left out."""
        for event in score(self.stream, reader, should_stop, place):
            if isinstance(event, Progress):
                # What can be read again is not cut short by a stop.
                if event.is_last and self._waiting and not reader.is_replayed:
                    yield from self._judged(_whole(self._take()))
                yield event
            elif self._threshold is None:
                yield from self._judged(event)
            else:
                self._waiting.append(event)
                size = sum(len(part.text) for part in self._waiting)
                if event.ends_line or size >= MAX_TURN_CHARS:
                    yield from self._judged(_whole(self._take()))

    def pack(self) -> dict[str, Any]:
        """What a checkpoint needs beside the stream, as JSON can say it."""
        return {"usual": self._usual.pack(), "waiting": [asdict(part) for part in self._waiting]}

    def unpack(self, packed: Mapping[str, Any]) -> None:
        """Go on from what `pack` gave; the caller restores the stream."""
        self._usual.unpack(packed["usual"])
        self._waiting = [
            LineScored(**{**part, "origin": Origin(**part["origin"])}) for part in packed["waiting"]
        ]

    def _take(self) -> list[LineScored]:
        waiting, self._waiting = self._waiting, []
        return waiting

    def _judged(self, line: LineScored) -> Iterator[LineScored]:
        own = line.nats_per_token
        if own is not None and line.text.strip():
            line = replace(line, z_score=self._usual.z_score(own))
            self._usual.add(own)
        if self._threshold is None or self._threshold.passes(line):
            yield line


def _whole(parts: list[LineScored]) -> LineScored:
    """The parts of a line as one."""
    first, last = parts[0], parts[-1]
    if first is last:
        return first
    return replace(
        first,
        ends_line=last.ends_line,
        text="".join(part.text for part in parts),
        num_tokens=sum(part.num_tokens for part in parts),
        num_scored=sum(part.num_scored for part in parts),
        nats=sum(part.nats for part in parts),
    )
