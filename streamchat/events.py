"""What the engine says while it works. Plain data: whoever draws it decides how."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["end_token", "stop_string", "length"]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt is being fed; it is there when `num_tokens` has reached `num_total`."""

    num_tokens: int
    num_total: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that is certain: whole characters, no part of a stop string."""

    text: str


@dataclass(frozen=True, slots=True)
class Evicted:
    """Stream positions `first` to `last`, both included, have left the cache."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Generation has ended.

    Attributes:
        reason: `end_token`, `stop_string`, or `length` (the cap on new tokens).
        num_tokens: Tokens sampled and kept in the stream.
        elapsed_seconds: Time spent decoding, the prompt excluded.
    """

    reason: FinishReason
    num_tokens: int
    elapsed_seconds: float


@dataclass(frozen=True, slots=True)
class ThinkingDelta:
    """Text of a thinking block: shown on request, and not kept."""

    text: str


@dataclass(frozen=True, slots=True)
class TurnsEvicted:
    """Turns `first` to `last` of a conversation have wholly left the cache."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class QuestionEvicted:
    """The question that is being answered is leaving the cache."""

    turn: int


@dataclass(frozen=True, slots=True)
class PassagesRecalled:
    """The model is told again what had left the cache.

    Attributes:
        text: The very words, which stand in the turn before the question.
        num_passages: How many passages of the log are in it.
    """

    text: str
    num_passages: int


Event = (
    Prefilled
    | TextDelta
    | ThinkingDelta
    | Evicted
    | TurnsEvicted
    | QuestionEvicted
    | PassagesRecalled
    | Finished
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What the input says about words beside the words; None where it says nothing.

    Attributes:
        file: Name of the file they are in, where there are several.
        file_line: Number of the line in that file, from 1.
        last_line: Number of the last line, where they take more than one.
        start: Seconds at which they begin, from the start of the recording or from a midnight.
        end: Seconds at which they end.
        speaker: Who says them.
        turn: Number of the turn, where the input marks turns, from 1.
    """

    file: str | None = None
    file_line: int | None = None
    last_line: int | None = None
    start: float | None = None
    end: float | None = None
    speaker: str | None = None
    turn: int | None = None


UNKNOWN = Origin()


@dataclass(frozen=True, slots=True)
class LineScored:
    """A line of input, or a part of a long one, and how surprising it was.

    Attributes:
        line: Number of the line, from 1.
        part: Number of the part in its line, from 1.
        ends_line: Whether the line ends here.
        text: Without the line end.
        position: Stream position of its first token.
        num_tokens: Its tokens, the line end among them.
        num_scored: Those that have a score: all but the first token of a stream.
        nats: Sum of their negative log-likelihoods.
        origin: What the input says about it.
        z_score: Its standard score: how far its nats per token lie above the running mean of the
            lines before it, in their standard deviations; None where these are too few or alike.
    """

    line: int
    part: int
    ends_line: bool
    text: str
    position: int
    num_tokens: int
    num_scored: int
    nats: float
    origin: Origin = UNKNOWN
    z_score: float | None = None

    @property
    def nats_per_token(self) -> float | None:
        """Mean over the tokens that have a score, or None if there is none."""
        return self.nats / self.num_scored if self.num_scored else None


@dataclass(frozen=True, slots=True)
class StreamStats:
    """Where a stream stands.

    Attributes:
        num_held: Tokens in the cache.
        cache_size: Tokens that fit.
        num_pinned: Sinks among them: never evicted.
        num_evicted: Tokens that have left.
        num_tokens: Tokens fed.
    """

    num_held: int
    cache_size: int
    num_pinned: int
    num_evicted: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a pipe has come.

    Attributes:
        stats: Where its stream stands.
        num_lines: Lines finished.
        busy_seconds: Time the model has worked.
        num_unnoted: Tokens that no note covers yet; None where no notes are taken.
        is_last: Whether nothing more will be read.
        lag_seconds: How long ago the oldest line arrived that was dealt with since the last
            `Progress`; None where there is none, or the input is no live one.
    """

    stats: StreamStats
    num_lines: int
    busy_seconds: float
    num_unnoted: int | None = None
    is_last: bool = False
    lag_seconds: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Tokens fed per second of work, waiting for input left out."""
        return self.stats.num_tokens / self.busy_seconds if self.busy_seconds else 0.0


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a line.

    Attributes:
        line: Number of the line.
        question: The line.
        text: The answer.
        position: Stream position of the line's first token.
        reason: Why the answer ended; None where the user stopped it.
        origin: What the input says about the line.
    """

    line: int
    question: str
    text: str
    position: int
    reason: FinishReason | None
    origin: Origin = UNKNOWN


@dataclass(frozen=True, slots=True)
class Note:
    """A note, and what it covers: every piece of the input is covered by one note.

    Attributes:
        number: From 1.
        text: The note.
        first_line: Number of the first line it covers.
        first_part: The part of that line it begins with.
        last_line: Number of the last line.
        last_part: The part of that line it ends with.
        ends_line: Whether the last line ends there.
        first_position: Stream position of the first token covered.
        last_position: Stream position of the last token covered.
        start: Seconds at which what it covers begins, where the input says so.
        end: Seconds at which it ends, or at which its last line begins.
        speakers: Who speaks in it, in order of appearance.
        files: The files that it covers lines of, where there are several.
        first_file_line: Number of the first line in the first of these.
        last_file_line: Number of the last line in the last of these, as it begins.
    """

    number: int
    text: str
    first_line: int
    first_part: int
    last_line: int
    last_part: int
    ends_line: bool
    first_position: int
    last_position: int
    start: float | None = None
    end: float | None = None
    speakers: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    first_file_line: int | None = None
    last_file_line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What several notes, or summaries of a level below, come to.

    Attributes:
        level: 1 for a summary of notes, 2 for one of such summaries, and so on.
        is_whole: Whether it covers all notes: the last one of a run.
        text: The summary.
        first_note: Number of the first note in it.
        last_note: Number of the last.
        first_line: Number of the first line that these cover.
        last_line: Number of the last.
        start: Seconds at which that begins, where the input says so.
        end: Seconds at which it ends.
    """

    level: int
    is_whole: bool
    text: str
    first_note: int
    last_note: int
    first_line: int
    last_line: int
    start: float | None = None
    end: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FellBehind:
    """Something was left out because a live input came faster than the model can follow.

    Attributes:
        skipped: `lines` that were not read, or a `note` that was not written.
        first_line: Number of the first line concerned.
        last_line: Number of the last.
        lag_seconds: How long input had waited.
    """

    skipped: Literal["lines", "note"]
    first_line: int
    last_line: int
    lag_seconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a question that was asked while the stream goes on; no part of the stream.

    Attributes:
        question: What was asked.
        text: The answer.
        position: Stream position at which it was asked.
        line: Number of the last line read by then.
    """

    question: str
    text: str
    position: int
    line: int
