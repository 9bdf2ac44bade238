"""Running notes of a transcript: written before the text they cover leaves the memory.

The transcript streams behind a pinned instruction, inside a user turn that stays open. A note is
asked for on a fork of the stream, so that neither the question nor the note is ever part of it: the
stream's numbers are the same with and without notes.

The promise: no text leaves the window without a note. A note is written before the text that no
note covers, the question and the longest note would together be longer than the window.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from streamchat.chat.template import ChatTemplate
from streamchat.chat.thinking import split_thinking
from streamchat.config import CacheConfig, SamplingConfig
from streamchat.engine.stream import Stream
from streamchat.errors import ConfigError
from streamchat.events import Note, Origin, Progress, TextDelta
from streamchat.model.families import check_fits
from streamchat.model.load import LoadedModel
from streamchat.model.tokenizer import Marked
from streamchat.pipe.lines import MAX_PIECE_CHARS, Piece
from streamchat.pipe.place import Place
from streamchat.pipe.reader import Reader
from streamchat.pipe.score import batches

INSTRUCTION = (
    "You take notes. The user sends a transcript that goes on and on. When asked, write down what "
    "was said: names, facts, numbers, decisions. Be brief and invent nothing."
)
QUESTION = "\n\nSummarize this in two sentences."

GREEDY = SamplingConfig()

CHARS_PER_TOKEN = 2
"""A cautious guess of how long tokens are, to cut long lines into pieces well below the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotesConfig:
    """When and how notes are taken.

    Attributes:
        instruction: Pinned: what the notes should be.
        max_new_tokens: Cap on a note.
        every_tokens: A note after so many tokens, or None.
        every_seconds: A note after so many seconds, if anything came, or None.
        sampling: How notes are sampled.
        stop: Stop strings of a note.
    """

    instruction: str = INSTRUCTION
    max_new_tokens: int = 128
    every_tokens: int | None = None
    every_seconds: float | None = None
    sampling: SamplingConfig = GREEDY
    stop: tuple[str, ...] = ()


class NoteTaker:
    """Takes notes of one stream.

    Args:
        loaded: The model.
        cache: Sizes; the sinks are raised to the length of the instruction.
        config: When and how.

    Raises:
        ConfigError: If the window is too small for a question and a note.
    """

    def __init__(self, loaded: LoadedModel, cache: CacheConfig, config: NotesConfig) -> None:
        template = ChatTemplate(loaded.tokenizer, config.instruction)
        pinned = template.pinned_ids()
        self.cache_config = cache.pin(len(pinned))
        check_fits(loaded.model.config, self.cache_config)
        self.config = config
        self.num_pinned = len(pinned)
        question = [Marked(QUESTION, is_text=True), Marked(template.segments.before_answer)]
        question.append(Marked(template.segments.before_thinking))
        self._opens_thinking = template.opens_thinking
        self._question = loaded.tokenizer.encode_marked(question, continues=True)
        self._stop = (*config.stop, *template.segments.stop)
        window_size = self.cache_config.window_size
        self.limit = window_size - len(self._question) - config.max_new_tokens
        if self.limit < 1:
            raise ConfigError(
                f"window {window_size} is too small for notes: the question takes "
                f"{len(self._question)} tokens and a note up to {config.max_new_tokens}; "
                "raise --window or lower --max-new"
            )
        self.stream = Stream(loaded, self.cache_config)
        self.stream.feed(pinned)
        self.num_unnoted = 0
        self.num_notes = 0
        self._covered: list[Piece] = []
        self._last_note = time.monotonic()

    @property
    def max_piece_chars(self) -> int:
        """How long pieces of a line may be, so that several fit between two notes."""
        return max(64, min(MAX_PIECE_CHARS, CHARS_PER_TOKEN * self.limit))

    def take(
        self, reader: Reader, should_stop: Callable[[], bool], place: Place | None = None
    ) -> Iterator[Note | Progress]:
        """Feed a reader's lines, and yield notes as they fall due.

        Args:
            reader: Where the lines come from.
            should_stop: Asked between batches; true ends the stream with a last note.
            place: Where the stream stands in the input; moved on.

        Yields:
            `Note`s, and a `Progress` after each batch, while nothing comes, before the last note
            and after it.
        """
        place = place or Place()
        tokenizer = self.stream.loaded.tokenizer
        for batch in batches(reader, tokenizer, self.stream.chunk_size, should_stop):
            started = time.perf_counter()
            waiting: list[int] = []
            for piece, ids in zip(batch.pieces, batch.ids, strict=True):
                place.num_lines += piece.ends_line
                for begin in range(0, len(ids), self.limit):
                    part = ids[begin : begin + self.limit]
                    if self.num_unnoted + len(part) > self.limit:
                        self._feed(waiting)
                        yield from self._note()
                    waiting += part
                    self.num_unnoted += len(part)
                    self._covered.append(piece)
                    if self.num_unnoted >= (self.config.every_tokens or self.limit):
                        self._feed(waiting)
                        yield from self._note()
            self._feed(waiting)
            if self._is_time():
                yield from self._note()
            place.busy_seconds += time.perf_counter() - started
            place.add(batch.pieces)
            yield self._progress(place)
        yield self._progress(place, is_last=True)
        yield from self._note()
        yield self._progress(place, is_last=True)

    def pack(self) -> dict[str, Any]:
        """What a checkpoint needs beside the stream, as JSON can say it: the text without a note.

        Ask at a `Progress`.
        """
        return {
            "num_notes": self.num_notes,
            "num_unnoted": self.num_unnoted,
            "seconds_since_note": time.monotonic() - self._last_note,
            "covered": [asdict(piece) for piece in self._covered],
        }

    def unpack(self, packed: Mapping[str, Any]) -> None:
        """Go on from what `pack` gave; the caller restores the stream."""
        self.num_notes, self.num_unnoted = packed["num_notes"], packed["num_unnoted"]
        self._last_note = time.monotonic() - packed["seconds_since_note"]
        self._covered = [
            Piece(**{**piece, "origin": Origin(**piece["origin"])}) for piece in packed["covered"]
        ]

    def _progress(self, place: Place, *, is_last: bool = False) -> Progress:
        return Progress(
            self.stream.stats(),
            place.num_lines,
            place.busy_seconds,
            self.num_unnoted,
            is_last=is_last,
        )

    def _feed(self, waiting: list[int]) -> None:
        self.stream.feed(waiting)
        waiting.clear()

    def _is_time(self) -> bool:
        seconds = self.config.every_seconds
        return seconds is not None and time.monotonic() - self._last_note >= seconds

    def _note(self) -> Iterator[Note]:
        """A note on what none covers yet, unless it is white space alone."""
        if any(piece.text.strip() for piece in self._covered):
            self.num_notes += 1
            first, last = self._covered[0], self._covered[-1]
            origins = [piece.origin for piece in self._covered]
            times = [(o.start, o.end) for o in origins if o.start is not None]
            yield Note(
                number=self.num_notes,
                text=self._ask(),
                first_line=first.line,
                first_part=first.part,
                last_line=last.origin.last_line or last.line,
                last_part=last.part,
                ends_line=last.ends_line,
                first_position=self.stream.position - self.num_unnoted,
                last_position=self.stream.position - 1,
                start=times[0][0] if times else None,
                end=(times[-1][0] if times[-1][1] is None else times[-1][1]) if times else None,
                speakers=_distinct(origin.speaker for origin in origins),
                files=_distinct(origin.file for origin in origins),
            )
        self.num_unnoted = 0
        self._covered.clear()
        self._last_note = time.monotonic()

    def _ask(self) -> str:
        """Ask for a note on a fork, which is thrown away."""
        fork = self.stream.fork()
        fork.feed(self._question)
        answer = fork.generate(
            max_new_tokens=self.config.max_new_tokens,
            sampling=self.config.sampling,
            stop=self._stop,
        )
        events = split_thinking(answer, thinking=self._opens_thinking)
        return "".join(event.text for event in events if isinstance(event, TextDelta)).strip()


def _distinct(names: Iterable[str | None]) -> tuple[str, ...]:
    """Each name once, in order of appearance."""
    return tuple(dict.fromkeys(name for name in names if name is not None))
