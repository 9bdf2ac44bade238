"""StreamEval: facts in a stream, asked for when they lie so many tokens back.

Xiao et al. 2023 (arXiv:2309.17453, section 4.3 and appendix C) ask a question every few lines of a
stream, about a line some lines before; their data and code were never published. This is a test of
the same kind. Its lines are made here: each gives the content of a register, a random number. All
policies are asked the same questions about the same stream.

Each question is asked on a fork of the stream, so that asking disturbs nothing, and in two ways:

* the model goes on with the answer, greedily; right is whoever says the number, and no longer one
  that contains it. A guess is as good as never right.
* the number and others that occur nowhere in the stream are scored; right is whoever finds the
  number the likeliest. A model that has seen none of them is right by chance only. Small models
  which cannot tie a number to its register can still do this.
"""

import math
import random
import re
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from streamchat.chat.template import ChatTemplate
from streamchat.config import CacheConfig, Policy
from streamchat.engine.stream import Stream
from streamchat.errors import ConfigError, StreamFullError
from streamchat.events import TextDelta
from streamchat.model.load import LoadedModel
from streamchat.model.tokenizer import Marked, Tokenizer

NUM_DISTRACTORS = 4
"""Other numbers that a model chooses from."""

LINES_BETWEEN = 4
"""Lines from one set of questions, one for each distance, to the next."""

MAX_ANSWER = 12
"""Tokens of an answer: a number of five digits in any vocabulary, and some more."""

VALUES = range(10_000, 100_000)

ADJECTIVES = """
amber brave calm dusty early faint gentle hollow icy jolly keen lively misty narrow olive pale quiet
rusty silver tidy upper vivid wooden young
"""
NOUNS = """
anchor badger candle donkey engine fox garden hammer island jacket kettle ladder mirror needle otter
pepper quarry ribbon saddle tunnel umbrella valley window yacht
"""
"""Registers are called by one of each."""


@dataclass(frozen=True, slots=True)
class Form:
    """How facts and questions are put to a model.

    Attributes:
        header: Ids before the first line.
        before_answer: What stands between a question and its answer; markup.
    """

    header: list[int]
    before_answer: str

    def question_ids(self, tokenizer: Tokenizer, name: str) -> list[int]:
        """From the end of the last line to where the number is to come."""
        pieces = [
            Marked(f"\nQuestion: What is the register content of {name}?", is_text=True),
            Marked(self.before_answer),
            Marked(f"The register content of {name} is", is_text=True),
        ]
        return tokenizer.encode_marked(pieces, continues=True)


def form_for(tokenizer: Tokenizer, *, plain: bool) -> Form:
    """A user's turn by the model's chat template; without one, or if plain, text alone."""
    if plain or not tokenizer.has_chat_template:
        return Form(tokenizer.bos_ids(), "\nAnswer: ")
    template = ChatTemplate(tokenizer, None)
    return Form(template.pinned_ids(), template.segments.before_answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question.

    Attributes:
        distance: How far back its fact is asked for, in tokens.
        ids: From the last line to where the number is to come.
        start: Stream position of the first token of the fact: of the oldest line that begins no
            more than `distance` tokens before the place where the number is to come.
        value: The number.
        choices: Ids of the numbers to choose from.
        right: Index of the right one.
    """

    distance: int
    ids: list[int]
    start: int
    value: str
    choices: list[list[int]]
    right: int


@dataclass(frozen=True, slots=True)
class Exam:
    """A stream and the questions about it: the same for all policies.

    Attributes:
        parts: Ids to feed, and what is asked after them.
    """

    parts: list[tuple[list[int], list[Question]]]

    @property
    def num_questions(self) -> int:
        """How many there are."""
        return sum(len(questions) for _, questions in self.parts)

    @property
    def num_tokens(self) -> int:
        """How many tokens a cache must hold in which nothing is evicted."""
        fed = sum(len(ids) for ids, _ in self.parts)
        return fed + max(map(_length, self.parts[-1][1]))


def _length(question: Question) -> int:
    """Tokens that it takes to ask it, with the longest answer."""
    return len(question.ids) + max(MAX_ANSWER, *map(len, question.choices))


class _Facts:
    """Names, each once, and numbers, each once; the same from the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._names = [
            f"{adjective}-{noun}" for adjective in ADJECTIVES.split() for noun in NOUNS.split()
        ]
        self._random.shuffle(self._names)
        self._values = self._random.sample(VALUES, len(VALUES))
        self._num_names = 0

    def name(self) -> str:
        """A new name; once there are no more words, with a number behind it."""
        turn, index = divmod(self._num_names, len(self._names))
        self._num_names += 1
        return self._names[index] + (f"-{turn + 1}" if turn else "")

    def value(self) -> str:
        """A new number.

        Raises:
            ConfigError: If there are no more.
        """
        if not self._values:
            raise ConfigError(
                "the stream would be too long for numbers of five digits: lower --distances or "
                "--questions"
            )
        return str(self._values.pop())

    def place(self, count: int) -> int:
        """Where the right one of so many choices stands."""
        return self._random.randrange(count)


def make_exam(
    tokenizer: Tokenizer,
    form: Form,
    cache: CacheConfig,
    distances: Sequence[int],
    num_questions: int,
    seed: int,
) -> Exam:
    """Lines, and questions about them once the cache is full.

    Args:
        tokenizer: The model's.
        form: How the model is asked.
        cache: Any of the caches, all of one size; no question is about a line among the sinks.
        distances: Tokens from the beginning of a line to where its number is to be said.
        num_questions: At each distance.
        seed: Of names, numbers and places.

    Raises:
        ConfigError: If a distance is shorter than a line and the question about it, or the stream
            would be too long.
    """
    facts = _Facts(seed)
    names: list[str] = []
    values: list[str] = []
    starts: list[int] = []
    position = len(form.header)
    # The oldest line that is asked for begins behind what is kept for ever.
    begin = max(cache.cache_size, max(position, cache.sink_size) + max(distances))
    parts: list[tuple[list[int], list[Question]]] = []
    waiting = list(form.header)
    while len(parts) < num_questions:
        for _ in range(LINES_BETWEEN):
            names.append(facts.name())
            values.append(facts.value())
            starts.append(position)
            ids = tokenizer.encode_continuation(
                f"line {len(names)}: the register content of {names[-1]} is {values[-1]}\n"
            )
            waiting += ids
            position += len(ids)
        if position < begin:
            continue
        questions = []
        for distance in distances:
            index, ids = _oldest_within(tokenizer, form, distance, position, starts, names)
            choices = [facts.value() for _ in range(NUM_DISTRACTORS)]
            right = facts.place(len(choices) + 1)
            choices.insert(right, values[index])
            questions.append(
                Question(
                    distance=distance,
                    ids=ids,
                    start=starts[index],
                    value=values[index],
                    choices=[tokenizer.encode_continuation(f" {choice}") for choice in choices],
                    right=right,
                )
            )
        parts.append((waiting, questions))
        waiting = []
    return Exam(parts)


def _oldest_within(
    tokenizer: Tokenizer,
    form: Form,
    distance: int,
    position: int,
    starts: Sequence[int],
    names: Sequence[str],
) -> tuple[int, list[int]]:
    """The line that lies farthest back within a distance, and the question about it."""
    nearest = 0
    for index in range(bisect_left(starts, position - distance), len(starts)):
        ids = form.question_ids(tokenizer, names[index])
        nearest = position + len(ids) - starts[index]
        if nearest <= distance:
            return index, ids
    raise ConfigError(
        f"a distance of {distance} tokens is too short: a line and the question about it take "
        f"{nearest or 'more'}; raise --distances or --window"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of a question.

    Attributes:
        distance: See `Question`.
        text: What the model said.
        is_right: Whether the number was in it.
        is_chosen: Whether the number was the likeliest.
    """

    distance: int
    text: str
    is_right: bool
    is_chosen: bool


def take(
    loaded: LoadedModel,
    config: CacheConfig,
    exam: Exam,
    progress: Callable[[Answer], None] = lambda _answer: None,
) -> Iterator[Answer]:
    """Put an exam to one policy; ends early where a dense cache is full.

    Args:
        loaded: The model.
        config: Policy and sizes.
        exam: From `make_exam`.
        progress: Called with each answer.

    Yields:
        An answer for each question.
    """
    stream = Stream(loaded, config)
    try:
        for ids, questions in exam.parts:
            stream.feed(ids)
            for question in questions:
                answer = _ask(stream.fork(), question)
                progress(answer)
                yield answer
    except StreamFullError:
        return


def _ask(fork: Stream, question: Question) -> Answer:
    fork.feed(question.ids)
    before = fork.snapshot()
    losses = []
    for choice in question.choices:
        losses.append(math.fsum(loss for loss in fork.score(choice) if loss is not None))
        fork.restore(before)
    events = fork.generate(max_new_tokens=MAX_ANSWER, stop=("\n",))
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    return Answer(
        distance=question.distance,
        text=text,
        is_right=re.search(rf"(?<!\d){question.value}(?!\d)", text) is not None,
        is_chosen=losses.index(min(losses)) == question.right,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one policy remembers from one distance.

    Attributes:
        policy: Which.
        distance: In tokens, see `Question`.
        caches: The same, in caches.
        held: Whether all of the line was held: `yes`, `no`, or `by head` where each head holds
            other tokens.
        num_questions: Asked.
        answered: The part of them that was answered rightly.
        answered_by_chance: What guessing would give.
        chosen: The part of them where the number was the likeliest of the choices.
        chosen_by_chance: What guessing would give.
    """

    policy: Policy
    distance: int
    caches: float
    held: str
    num_questions: int
    answered: float
    answered_by_chance: float
    chosen: float
    chosen_by_chance: float


def scores(config: CacheConfig, answers: Sequence[Answer]) -> list[Score]:
    """Sum up a policy's answers, a row for each distance."""
    rows = []
    for distance in sorted({answer.distance for answer in answers}):
        own = [answer for answer in answers if answer.distance == distance]
        rows.append(
            Score(
                policy=config.policy,
                distance=distance,
                caches=distance / config.cache_size,
                held=_held(config, distance),
                num_questions=len(own),
                answered=statistics.fmean(answer.is_right for answer in own),
                answered_by_chance=1 / len(VALUES),
                chosen=statistics.fmean(answer.is_chosen for answer in own),
                chosen_by_chance=1 / (NUM_DISTRACTORS + 1),
            )
        )
    return rows


def _held(config: CacheConfig, distance: int) -> str:
    if config.policy in ("h2o", "snapkv"):
        return "by head"
    return "yes" if distance <= config.window_size else "no"


def verdict(rows: Sequence[Score]) -> str:
    """What the rows of one policy say, in a sentence."""
    near = [row for row in rows if row.caches <= 1]
    far = [row for row in rows if row.caches > 1]
    said = []
    for some, where in ((near, "within the cache's length"), (far, "beyond it")):
        if some:
            answered = _mean([row.answered for row in some], some)
            chosen = _mean([row.chosen for row in some], some)
            said.append(f"{answered:.0%} answered and {chosen:.0%} chosen {where}")
    return f"{rows[0].policy}: {'; '.join(said)} (by chance 0% and {rows[0].chosen_by_chance:.0%})"


def _mean(parts: Sequence[float], rows: Sequence[Score]) -> float:
    """Over all questions of some rows."""
    weights = [float(row.num_questions) for row in rows]
    return statistics.fmean(parts, weights)
