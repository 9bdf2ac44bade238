"""A conversation without an end: each turn feeds only its own new ids.

The system prompt and the chat header are pinned whole: the sinks are raised to their length. A turn
is closed when the next one begins, by the template's own marker, whatever ended it: an end token, a
stop string, the cap, or the user. What has been shown is what the model remembers; only thinking,
which happens on a fork, is not kept.
"""

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from streamchat.chat.template import ChatTemplate
from streamchat.chat.thinking import split_thinking
from streamchat.config import CacheConfig, SamplingConfig
from streamchat.engine.generate import Sampler, generate
from streamchat.engine.stream import Stream, StreamState
from streamchat.errors import StateError
from streamchat.events import (
    Event,
    Finished,
    Prefilled,
    QuestionEvicted,
    TextDelta,
    TurnsEvicted,
)
from streamchat.model.families import check_fits, has_learned_sinks
from streamchat.model.load import LoadedModel

MAX_TURNS = 1000
"""Turns whose texts are kept for `/evicted`; the model's memory does not depend on it."""


@dataclass(slots=True)
class Turn:
    """One question and its answer.

    Attributes:
        number: From 1.
        question: What the user said.
        start: Stream position of its first token.
        answer_start: Stream position of the answer's first token.
        end: Stream position after its last token.
        answer: What has been shown of the answer.
        told: What the model was told before the question, of what it had forgotten.
    """

    number: int
    question: str
    start: int
    answer_start: int
    end: int
    answer: str = ""
    told: str = ""

    def move(self, shift: int) -> None:
        """Count from another start: all positions grow by `shift`."""
        self.start += shift
        self.answer_start += shift
        self.end += shift


@dataclass(slots=True)
class _Past:
    """What `undo` goes back to: the moment before a turn."""

    state: StreamState
    turn: Turn
    num_gone: int


class Conversation:
    """A chat with one model.

    Args:
        loaded: The model.
        system: System prompt, or None for the template's own.
        cache: Sizes; `sink_size` is raised to the length of the pinned ids.
        sampling: How answers are sampled.
        max_new_tokens: Cap on an answer.
        stop: Stop strings.

    Raises:
        UnsupportedModelError: If the pinned ids and the window exceed the trained length.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        system: str | None = None,
        cache: CacheConfig | None = None,
        sampling: SamplingConfig | None = None,
        max_new_tokens: int = 1024,
        stop: Sequence[str] = (),
    ) -> None:
        self.loaded = loaded
        self.max_new_tokens = max_new_tokens
        learned = has_learned_sinks(loaded.model.config)
        self._asked = cache or CacheConfig(has_auto_sinks=True).settle(has_learned_sinks=learned)
        self._asked_stop = tuple(stop)
        self.set_sampling(sampling or SamplingConfig())
        self.set_system(system)

    def set_sampling(self, sampling: SamplingConfig) -> None:
        """Sample by these options from now on."""
        self.sampling = sampling
        self.sampler = Sampler(sampling)

    def set_system(self, system: str | None) -> None:
        """Start anew with another system prompt, or None for the template's own.

        Raises:
            UnsupportedModelError: If the pinned ids and the window exceed the trained length.
        """
        self.template = ChatTemplate(self.loaded.tokenizer, system)
        self.stop = (*self._asked_stop, *self.template.segments.stop)
        self.clear()

    def clear(self) -> None:
        """Start anew, with the same system prompt."""
        # A window without sinks is asked for by name, and pins nothing.
        pinned = len(self.template.pinned_ids()) if self._asked.pins else 0
        self._begin(self._asked.pin(pinned), pinned)

    def _begin(self, config: CacheConfig, num_pinned: int) -> None:
        """Begin a stream of these sizes, that nothing has been fed to yet."""
        check_fits(self.loaded.model.config, config)
        self.cache_config = config
        self.num_pinned = num_pinned
        self.stream = Stream(self.loaded, config)
        self.turns: deque[Turn] = deque(maxlen=MAX_TURNS)
        self.num_turns = 0
        self._now: StreamState | None = None
        self._past: _Past | None = None
        self._num_gone = 0

    def snapshot(self) -> StreamState:
        """The stream's state between two turns; copied once, however often it is asked for."""
        if self._now is None:
            self._now = self.stream.snapshot()
        return self._now

    def resume(
        self, state: StreamState, config: CacheConfig, num_pinned: int, turns: Sequence[Turn]
    ) -> None:
        """Go on from a state that was saved.

        Args:
            state: From `Stream.snapshot` of a stream with the same model.
            config: Its policy and sizes.
            num_pinned: How many of its first ids are the system prompt and chat header.
            turns: The newest turns that it has heard, oldest first.

        Raises:
            StateError: If the state does not belong to these sizes.
            UnsupportedModelError: If these exceed the trained length.
        """
        self._begin(config, num_pinned)
        self.stream.restore(state)
        self.turns.extend(turns)
        self.num_turns = turns[-1].number if turns else 0
        # Those from before the stream began anew have no position in it.
        self._num_gone = max((turn.number for turn in turns if turn.end <= 0), default=0)
        self.num_turns_gone()

    def remember(self, turns: Sequence[Turn]) -> None:
        """Take turns for `/evicted` that the model has not heard; no other may be there yet."""
        self.turns.extend(turns)
        self.num_turns = self._num_gone = turns[-1].number if turns else 0

    def replay(self, turn: Turn) -> None:
        """Feed a turn that was said before; where it stands in the stream is set anew."""
        self._now = self._past = None
        turn.start = self.stream.position
        self.stream.feed(self._question_ids(turn.told + turn.question))
        turn.answer_start = self.stream.position
        self.stream.feed(self.loaded.tokenizer.encode_continuation(turn.answer))
        turn.end = self.stream.position
        self.turns.append(turn)
        self.num_turns = turn.number
        self.num_turns_gone()

    def hear(self, text: str) -> None:
        """Feed a line that is no turn, as `pipe` does; at the start behind the chat header."""
        self._now = self._past = None
        if self.stream.position == 0:
            self.stream.feed(self.template.pinned_ids())
        self.stream.feed(self.loaded.tokenizer.encode(f"{text}\n"))

    def num_tokens(self, said: Turn | str) -> int:
        """How many tokens `replay` or `hear` would feed, at the stream's start or elsewhere."""
        tokenizer = self.loaded.tokenizer
        if isinstance(said, str):
            return len(tokenizer.encode(f"{said}\n"))
        question = self.template.next_turn(said.told + said.question)
        return len(question) + len(tokenizer.encode_continuation(said.answer))

    def _question_ids(self, question: str) -> list[int]:
        if self.stream.position == 0:
            return self.template.first_turn(question)
        return self.template.next_turn(question)

    def say(self, question: str, told: str = "") -> Generator[Event, None, None]:
        """Ask, and yield the answer as it comes.

        Closing the generator ends the answer there: what was shown stays in the conversation. While
        the question is still being fed, it takes the turn back.

        Args:
            question: The user's turn.
            told: What stands before it in the turn, and is not the user's.

        Yields:
            `Prefilled`, `TextDelta` and `ThinkingDelta`, `Evicted`, `TurnsEvicted` and
            `QuestionEvicted`, and one `Finished`.
        """
        stream = self.stream
        ids = self._question_ids(told + question)
        state, start, num_gone = self.snapshot(), stream.position, self._num_gone
        self._now = None
        try:
            for begin in range(0, len(ids), stream.chunk_size):
                chunk = ids[begin : begin + stream.chunk_size]
                stream.feed(chunk)
                yield Prefilled(begin + len(chunk), len(ids))
        except BaseException:  # the user, or a dense cache that is full
            stream.restore(state)
            raise
        self.num_turns += 1
        turn = Turn(self.num_turns, question, start, stream.position, stream.position, told=told)
        self.turns.append(turn)
        self._past = _Past(state, turn, num_gone)
        yield from self._turns_evicted()
        answer = self._think_apart() if self.template.thinks else self._generate(stream)
        yield from self._answer(turn, answer)

    def _answer(self, turn: Turn, answer: Generator[Event, None, None]) -> Iterator[Event]:
        """Pass an answer's events on, keep its text, and tell what leaves the memory."""
        finished: Finished | None = None
        question_told = False
        question_end = turn.end
        try:
            for event in answer:
                if isinstance(event, Finished):
                    finished = event
                    continue
                if isinstance(event, TextDelta):
                    turn.answer += event.text
                yield event
                if not question_told and self._is_leaving(turn.start, question_end):
                    question_told = True
                    yield QuestionEvicted(turn.number)
                turn.end = self.stream.position
                yield from self._turns_evicted()
        finally:
            answer.close()
            turn.end = self.stream.position
        if not question_told and self._is_leaving(turn.start, question_end):
            yield QuestionEvicted(turn.number)  # by an answer that was thought about on a fork
        yield from self._turns_evicted()
        if finished is not None:
            yield finished

    def _generate(self, stream: Stream) -> Generator[Event, None, None]:
        return generate(stream, self.max_new_tokens, self.sampler, self.stop)

    def _think_apart(self) -> Generator[Event, None, None]:
        """Think and answer on a fork; keep the answer alone."""
        fork = self.stream.fork()
        fork.feed(self.template.thinking_ids())
        answer = ""
        inner = self._generate(fork)
        try:
            for event in split_thinking(inner, thinking=self.template.opens_thinking):
                if isinstance(event, TextDelta):
                    answer += event.text
                yield event
        finally:
            inner.close()
            self.stream.feed(self.loaded.tokenizer.encode_continuation(answer))

    def undo(self) -> bool:
        """Take the last turn back.

        Returns:
            Whether the model's state is exactly what it was: true for one turn back, whose state
            was kept. Beyond that the tokens that were retained are fed again, so the model has
            forgotten what it knew of text before them.

        Raises:
            StateError: If there is no turn.
        """
        if not self.turns:
            raise StateError("there is no turn to take back")
        turn = self.turns.pop()
        self.num_turns -= 1
        past, self._past, self._now = self._past, None, None
        exact = past is not None and past.turn is turn
        if past is not None and exact:
            self.stream.restore(past.state)
            self._num_gone = past.num_gone
        else:
            self._rebuild(turn.start)
        return exact

    def _rebuild(self, position: int) -> None:
        """Feed again what was retained at `position`, as far as its ids are still known."""
        config, pinned = self.cache_config, self.template.pinned_ids()[: self.num_pinned]
        recent = list(self.stream.recent_ids)
        oldest_known = self.stream.position - len(recent)
        self.stream = Stream(self.loaded, config)
        begin = position  # of what is fed again; the turns before it are gone
        if self.turns and position > len(pinned):
            begin = max(position - config.window_size, oldest_known)
            if begin <= config.sink_size:  # no gap behind the sinks
                begin = oldest_known
            kept = recent[begin - oldest_known : max(0, position - oldest_known)]
            self.stream.feed(kept if begin == 0 else [*pinned, *kept])
        self._num_gone = max((t.number for t in self.turns if t.end <= begin), default=0)
        shift = position - self.stream.position
        for turn in self.turns:
            turn.move(-shift)

    def _is_leaving(self, start: int, end: int) -> bool:
        """Whether some of the positions from `start` to before `end` have left the cache."""
        sinks = self.cache_config.sink_size
        return end > sinks and self.window_start() > max(start, sinks)

    def window_start(self) -> int:
        """Stream position of the oldest token that is held and not a sink."""
        return self.stream.cache.layout.held_window(self.stream.position).start

    def num_turns_gone(self) -> int:
        """Number of the newest turn that has wholly left the model's memory; 0 for none.

        Turns before it have left as well, but for those that stand among the sinks.
        """
        start, sinks = self.window_start(), self.cache_config.sink_size
        for turn in self.turns:
            if turn.number > self._num_gone and turn.end > sinks:
                if turn.end > start:
                    break
                self._num_gone = turn.number
        return self._num_gone

    def _turns_evicted(self) -> Iterator[Event]:
        before, sinks = self._num_gone, self.cache_config.sink_size
        now = self.num_turns_gone()
        gone = [t.number for t in self.turns if before < t.number <= now and t.end > sinks]
        if gone:
            yield TurnsEvicted(gone[0], gone[-1])
