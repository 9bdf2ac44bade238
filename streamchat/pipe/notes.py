"""Running notes of a transcript: written before the text they cover leaves the memory.

The transcript streams behind a pinned instruction, inside a user turn that stays open. A note is
asked for on a fork of the stream, so that neither the question nor the note is ever part of it: the
stream's numbers are the same with and without notes.

The promise: no text leaves the window without a note. A note is written before the text that no
note covers, the question and the longest note would together be longer than the window. Only who
asks for notes to be skipped when a live input is too fast gets gaps, and is told each.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from streamchat.chat.template import ChatTemplate
from streamchat.config import CacheConfig, SamplingConfig
from streamchat.engine.stream import Stream
from streamchat.errors import ConfigError
from streamchat.events import Answer, FellBehind, Note, Origin, Progress, Summary
from streamchat.model.families import check_fits
from streamchat.model.load import LoadedModel
from streamchat.pipe.aside import Aside
from streamchat.pipe.due import Due
from streamchat.pipe.interval import Interval
from streamchat.pipe.lines import MAX_PIECE_CHARS, Piece
from streamchat.pipe.place import Place
from streamchat.pipe.reader import Reader
from streamchat.pipe.roll_up import Level, RollUp
from streamchat.pipe.score import batches

INSTRUCTION = (
    "You take notes. The user sends a transcript that goes on and on. When asked, write down what "
    "was said: names, facts, numbers, decisions. Be brief and invent nothing."
)
QUESTION = "\n\nSummarize this in two sentences."
NOTES_SO_FAR = "\n\nNotes so far:\n"
QUESTION_AFTER_NOTES = "\nSummarize in two sentences what was said after these notes."
NOTES = "Notes of the transcript, in order:\n"
QUESTION_OF_NOTES = "\nSummarize in three sentences what was said."

GREEDY = SamplingConfig()
SELDOM = Interval()

CHARS_PER_TOKEN = 2
"""A cautious guess of how long tokens are, to cut long lines into pieces well below the limit."""

ITEM_TOKENS = 8
"""What a note in a list takes beside its own tokens, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotesConfig:
    """When and how notes are taken.

    Attributes:
        instruction: Pinned: what the notes should be.
        max_new_tokens: Cap on a note.
        every: A note after so many tokens or seconds, if anything came.
        idle_seconds: A note after so long without input, if it is live; None for none.
        on_turn: A note when another speaker begins.
        carry: How many of the last notes are shown to the model with the question.
        roll_up: When notes are summed up, level by level; empty for never.
        max_lag: Where live input has waited for longer, in seconds, a note that is due is not
            written; None to write all.
        sampling: How notes are sampled.
        stop: Stop strings of a note.
    """

    instruction: str = INSTRUCTION
    max_new_tokens: int = 128
    every: Interval = SELDOM
    idle_seconds: float | None = None
    on_turn: bool = False
    carry: int = 0
    roll_up: tuple[Level, ...] = ()
    max_lag: float | None = None
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
        self._pinned = template.pinned_ids()
        self.cache_config = cache.pin(len(self._pinned))
        check_fits(loaded.model.config, self.cache_config)
        self.config = config
        self.aside = Aside(
            template,
            max_new_tokens=config.max_new_tokens,
            sampling=config.sampling,
            stop=config.stop,
        )
        self.stream = Stream(loaded, self.cache_config)
        self.stream.feed(self._pinned)
        self.num_unnoted = 0
        self.num_notes = 0
        self._covered: list[Piece] = []
        self._recent: deque[str] = deque(maxlen=config.carry)
        self._due = Due(config.every, config.idle_seconds, on_turn=config.on_turn)
        self._longest_question = self._check_room()
        self._question = self.aside.ids(QUESTION)
        self._roll_up = self._make_roll_up()

    @property
    def num_pinned(self) -> int:
        """Tokens of the instruction."""
        return len(self._pinned)

    @property
    def limit(self) -> int:
        """Tokens that may stand without a note, with the question as it is now."""
        return self._limit(len(self._question))

    @property
    def max_piece_chars(self) -> int:
        """How long pieces of a line may be, so that several fit between two notes."""
        limit = self._limit(self._longest_question)
        return max(64, min(MAX_PIECE_CHARS, CHARS_PER_TOKEN * limit))

    def take(
        self,
        reader: Reader,
        should_stop: Callable[[], bool],
        place: Place | None = None,
        *,
        asked: Callable[[], str | None] = lambda: None,
    ) -> Iterator[Note | Summary | FellBehind | Answer | Progress]:
        """Feed a reader's lines, and yield notes as they fall due.

        Args:
            reader: Where the lines come from.
            should_stop: Asked between batches; true ends the stream with a last note.
            place: Where the stream stands in the input; moved on.
            asked: Gives the next question that a user has asked meanwhile, if any.

        Yields:
            `Note`s and what they are rolled up to, what was skipped, answers, and a `Progress`
            after each batch, while nothing comes, before the last note and after it.
        """
        place = place or Place()
        tokenizer = self.stream.loaded.tokenizer
        for batch in batches(reader, tokenizer, self.stream.chunk_size, should_stop):
            started = time.perf_counter()
            waited = batch.lag_seconds or 0.0
            waiting: list[int] = []
            for piece, ids in zip(batch.pieces, batch.ids, strict=True):
                place.num_lines += piece.ends_line
                if self._due.before(piece):
                    self._feed(waiting)
                    yield from self._note(max(waited, reader.lag_seconds))
                while ids:
                    part = ids[: self.limit]
                    if self.num_unnoted + len(part) > self.limit:
                        self._feed(waiting)
                        yield from self._note(max(waited, reader.lag_seconds))
                        continue
                    ids = ids[len(part) :]
                    waiting += part
                    self.num_unnoted += len(part)
                    self._covered.append(piece)
                    self._due.add(piece)
                    every = self.config.every.tokens or self.limit
                    if self.num_unnoted >= min(every, self.limit):
                        self._feed(waiting)
                        yield from self._note(max(waited, reader.lag_seconds))
            self._feed(waiting)
            if self._due.after(self.num_unnoted, reader.idle_seconds, is_live=reader.is_live):
                yield from self._note(max(waited, reader.lag_seconds))
            place.busy_seconds += time.perf_counter() - started
            place.add(batch.pieces)
            yield self._progress(place, lag_seconds=batch.lag_seconds)
            while (question := asked()) is not None:
                yield self.aside.answer_about(self.stream, question, place.last_line)
        yield self._progress(place, is_last=True)
        yield from self._note(0.0)
        yield self._progress(place, is_last=True)
        if self._roll_up is not None:
            yield from self._roll_up.whole()

    def pack(self) -> dict[str, Any]:
        """What a checkpoint needs beside the stream, as JSON can say it: the text without a note.

        Ask at a `Progress`.
        """
        return {
            "num_notes": self.num_notes,
            "num_unnoted": self.num_unnoted,
            "due": self._due.pack(),
            "recent": list(self._recent),
            "roll_up": None if self._roll_up is None else self._roll_up.pack(),
            "covered": [asdict(piece) for piece in self._covered],
        }

    def unpack(self, packed: Mapping[str, Any]) -> None:
        """Go on from what `pack` gave; the caller restores the stream."""
        self.num_notes, self.num_unnoted = packed["num_notes"], packed["num_unnoted"]
        self._due.unpack(packed["due"])
        self._carry(packed["recent"])
        if self._roll_up is not None:
            self._roll_up.unpack(packed["roll_up"])
        self._covered = [
            Piece(**{**piece, "origin": Origin(**piece["origin"])}) for piece in packed["covered"]
        ]

    def _limit(self, num_question: int) -> int:
        return self.cache_config.window_size - num_question - self.config.max_new_tokens

    def _check_room(self) -> int:
        """The longest that a question may be, with all the notes that it carries."""
        config, longest = self.config, len(self.aside.ids(QUESTION))
        if config.carry:
            longest = len(self.aside.ids(NOTES_SO_FAR + QUESTION_AFTER_NOTES))
            longest += config.carry * (config.max_new_tokens + ITEM_TOKENS)
        if self._limit(longest) < 1:
            carried = f", {config.carry} notes with it among them" if config.carry else ""
            raise ConfigError(
                f"window {self.cache_config.window_size} is too small for notes: the question "
                f"takes {longest} tokens{carried}, and a note up to {config.max_new_tokens}; raise "
                f"--window or lower --max-new{' or --carry' * bool(config.carry)}"
            )
        return longest

    def _carry(self, notes: Iterable[str]) -> None:
        """Show these notes with the next question, the oldest left out if they are too long."""
        self._recent.extend(notes)
        self._question = self.aside.ids(QUESTION)
        while self._recent:
            text = NOTES_SO_FAR + _listed(self._recent) + QUESTION_AFTER_NOTES
            self._question = self.aside.ids(text)
            if len(self._question) <= self._longest_question:
                return
            self._recent.popleft()
            self._question = self.aside.ids(QUESTION)

    def _make_roll_up(self) -> RollUp | None:
        if not self.config.roll_up:
            return None
        fixed = len(self._question_of([]))
        item = self.config.max_new_tokens + ITEM_TOKENS
        room = self._limit(fixed) - item
        if room < 2 * item:
            raise ConfigError(
                f"window {self.cache_config.window_size} is too small for summaries of notes: one "
                f"needs room for three notes of {item} tokens; raise --window or lower --max-new"
            )
        tokenizer = self.stream.loaded.tokenizer

        def size(text: str) -> int:
            return len(tokenizer.encode(_listed([text])))

        return RollUp(self.config.roll_up, room, size, self._summarize)

    def _question_of(self, notes: Sequence[str]) -> list[int]:
        return self.aside.ids(NOTES + _listed(notes) + QUESTION_OF_NOTES)

    def _summarize(self, notes: Sequence[str]) -> str:
        """One text of several notes, in a stream of their own."""
        stream = Stream(self.stream.loaded, self.cache_config)
        stream.feed(self._pinned)
        return self.aside.answer(stream, self._question_of(notes))

    def _progress(
        self, place: Place, *, is_last: bool = False, lag_seconds: float | None = None
    ) -> Progress:
        return Progress(
            self.stream.stats(),
            place.num_lines,
            place.busy_seconds,
            self.num_unnoted,
            is_last=is_last,
            lag_seconds=lag_seconds,
        )

    def _feed(self, waiting: list[int]) -> None:
        self.stream.feed(waiting)
        waiting.clear()

    def _note(self, lag: float) -> Iterator[Note | Summary | FellBehind]:
        """A note on what none covers yet, unless it is white space alone, or `lag` too long."""
        if any(piece.text.strip() for piece in self._covered):
            first, last = self._covered[0], self._covered[-1]
            last_line = last.origin.last_line or last.line
            if self.config.max_lag is not None and lag > self.config.max_lag:
                yield FellBehind(
                    skipped="note", first_line=first.line, last_line=last_line, lag_seconds=lag
                )
            else:
                note = self._written(first, last, last_line)
                yield note
                if self.config.carry:
                    self._carry([note.text])
                if self._roll_up is not None:
                    yield from self._roll_up.add(note)
        self.num_unnoted = 0
        self._covered.clear()
        self._due.note()

    def _written(self, first: Piece, last: Piece, last_line: int) -> Note:
        self.num_notes += 1
        origins = [piece.origin for piece in self._covered]
        times = [(o.start, o.end) for o in origins if o.start is not None]
        return Note(
            number=self.num_notes,
            text=self.aside.ask(self.stream, self._question),
            first_line=first.line,
            first_part=first.part,
            last_line=last_line,
            last_part=last.part,
            ends_line=last.ends_line,
            first_position=self.stream.position - self.num_unnoted,
            last_position=self.stream.position - 1,
            start=times[0][0] if times else None,
            end=(times[-1][0] if times[-1][1] is None else times[-1][1]) if times else None,
            speakers=_distinct(origin.speaker for origin in origins),
            files=_distinct(origin.file for origin in origins),
            first_file_line=first.origin.file_line,
            last_file_line=last.origin.file_line,
        )


def _listed(notes: Iterable[str]) -> str:
    """Notes as a list, each in one line."""
    return "".join(f"- {' '.join(note.split())}\n" for note in notes)


def _distinct(names: Iterable[str | None]) -> tuple[str, ...]:
    """Each name once, in order of appearance."""
    return tuple(dict.fromkeys(name for name in names if name is not None))
