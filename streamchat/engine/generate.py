"""Decode: choose a token, say its text, feed it, until something ends it.

When an answer ends, however it ends, the cache holds what has been shown and nothing else: closing
the generator feeds the token that was just shown, and takes back those whose text was held back; so
does a stop string, whose tokens had to be fed before it was complete.
"""

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from streamchat.config import SamplingConfig
from streamchat.engine.detokenize import MAX_UNFINISHED, Detokenizer
from streamchat.engine.stops import StopStrings
from streamchat.errors import StateError
from streamchat.events import Event, Evicted, Finished, FinishReason, TextDelta
from streamchat.model.tokenizer import mended

if TYPE_CHECKING:
    from streamchat.engine.stream import Stream


NUCLEUS_CANDIDATES = 1024
"""Most likely tokens that are searched for the smallest set before all are sorted."""


class NucleusWarper:
    """transformers' `TopPLogitsWarper`, but the vocabulary is not sorted: that takes half a step.

    Args:
        top_p: Keep the smallest set of tokens with this much probability, below 1.
    """

    def __init__(self, top_p: float) -> None:
        self._top_p = top_p
        self._of_all = TopPLogitsWarper(top_p)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Logits, shape (1, vocab_size), with all but the set at minus infinity."""
        largest, ids = scores.topk(min(NUCLEUS_CANDIDATES, scores.shape[-1]))
        probabilities = (largest - scores.logsumexp(dim=-1, keepdim=True)).exp()
        upto = probabilities.cumsum(dim=-1)
        if float(upto[0, -1]) < self._top_p:  # a flat distribution
            kept: Tensor = self._of_all(input_ids, scores)
            return kept
        largest = largest.masked_fill(upto - probabilities >= self._top_p, float("-inf"))
        return torch.full_like(scores, float("-inf")).scatter(-1, ids, largest)


class Sampler:
    """Chooses the next token, with transformers' own processors.

    Args:
        config: Temperature, filters, penalty, seed.
    """

    def __init__(self, config: SamplingConfig) -> None:
        self.config = config
        self._generator = torch.Generator()
        if config.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(config.seed)
        self._processors = LogitsProcessorList()
        if config.repetition_penalty != 1:
            self._processors.append(
                RepetitionPenaltyLogitsProcessor(float(config.repetition_penalty))
            )
        if config.temperature > 0:
            self._processors.append(TemperatureLogitsWarper(float(config.temperature)))
            if config.top_k:
                self._processors.append(TopKLogitsWarper(config.top_k))
            if config.top_p < 1:
                self._processors.append(NucleusWarper(config.top_p))
            if config.min_p > 0:
                self._processors.append(MinPLogitsWarper(config.min_p))

    def random_state(self) -> Tensor:
        """Where its random numbers stand, for `set_random_state`; uint8."""
        return self._generator.get_state()

    def set_random_state(self, state: Tensor) -> None:
        """Go on with the random numbers from there."""
        self._generator.set_state(state)

    def choose(self, logits: Tensor, recent_ids: Iterable[int]) -> int:
        """The next token's id.

        Args:
            logits: Shape (vocab_size,).
            recent_ids: Newest ids of the stream, for the repetition penalty.
        """
        if self._processors:
            window = list(recent_ids)[-self.config.penalty_window :]
            ids = torch.tensor([window], dtype=torch.long, device=logits.device)
            logits = self._processors(ids, logits[None].float())[0]
        if self.config.temperature == 0:
            return int(logits.argmax())
        # Drawn on the CPU: the same seed then gives the same ids on every device.
        probabilities = logits.float().softmax(dim=-1).cpu()
        return int(torch.multinomial(probabilities, 1, generator=self._generator))


@dataclass(slots=True)
class _Unit:
    """Fed tokens that complete their characters together.

    Attributes:
        logits_before: What `logits` was before the first of them.
        num_tokens: How many.
        text: What they say; grows until the last one is there.
        is_complete: Whether it is.
    """

    logits_before: Tensor
    num_tokens: int = 0
    text: str = ""
    is_complete: bool = False


class _Uncertain:
    """The newest fed tokens whose text has not all been shown: they may have to be taken back.

    Args:
        stream: The stream they are fed to.
        depth: How many tokens its cache can take back; older ones stay.
    """

    def __init__(self, stream: "Stream", depth: int) -> None:
        self._stream = stream
        self._depth = depth
        self._units: deque[_Unit] = deque()
        self._num_shown = 0  # characters of the units' text
        self._told = stream.position  # evictions by tokens before this one have been told
        # Spaces before the answer's first text that decoding leaves out (SentencePiece).
        self.lead = ""

    @property
    def num_tokens(self) -> int:
        """How many tokens may be taken back."""
        return sum(unit.num_tokens for unit in self._units)

    def add(self, logits_before: Tensor, text: str, shown: str, *, is_complete: bool) -> None:
        """A token was fed.

        Args:
            logits_before: What `logits` was before it.
            text: What it completed.
            shown: What its coming made certain, of its own text and that before it.
            is_complete: Whether no character is left unfinished.
        """
        if not self._units or self._units[-1].is_complete:
            self._units.append(_Unit(logits_before))
        unit = self._units[-1]
        unit.num_tokens += 1
        unit.text += text
        unit.is_complete = is_complete
        self._num_shown += len(shown)
        while self._units and (self._is_shown(self._units[0]) or self.num_tokens > self._depth):
            num_chars = len(self._units.popleft().text)
            self._num_shown = max(0, self._num_shown - num_chars)
            if num_chars:
                self.lead = ""

    def _is_shown(self, unit: _Unit) -> bool:
        return unit.is_complete and len(unit.text) <= self._num_shown

    def take_back(self, last_words: str = "") -> int:
        """Leave in the cache only what is shown of these tokens.

        Args:
            last_words: Text that is shown with the end.

        Returns:
            By how many tokens the stream has grown (below 0: shrunk).
        """
        if not self._units and not last_words:
            return 0
        shown = "".join(unit.text for unit in self._units)[: self._num_shown] + last_words
        num_tokens, tokenizer = self.num_tokens, self._stream.loaded.tokenizer
        if self._units:
            self._stream.rewind(num_tokens, self._units[0].logits_before)
        self._units.clear()
        ids = tokenizer.encode_continuation(self.lead + shown if shown else "")
        self._stream.feed(ids)
        return len(ids) - num_tokens

    def keep(self) -> None:
        """All of it is shown after all."""
        self._units.clear()

    def evicted(self) -> Iterator[Evicted]:
        """What has left since it was asked last, and cannot come back."""
        certain = self._stream.position - self.num_tokens
        gone = self._stream.cache.layout.evicted_by(self._told, certain - self._told)
        self._told = certain
        if gone:
            yield Evicted(gone.start, gone.stop - 1)


def generate(
    stream: "Stream", max_new_tokens: int, sampler: Sampler, stop: Sequence[str]
) -> Generator[Event, None, None]:
    """Continue a stream.

    Ends with `Finished`: at an end token, which is not fed; at a stop string, which is neither
    shown nor left in the cache; or after `max_new_tokens`. Ids that stand for no token are not
    chosen.

    Args:
        stream: Fed with at least one token.
        max_new_tokens: Cap on the tokens of this answer, at least 1.
        sampler: Chooses the tokens; its random state goes on from answer to answer.
        stop: Stop strings.

    Yields:
        `TextDelta`, `Evicted`, and one `Finished`.

    Raises:
        StateError: If the stream is empty or the cap is below 1.
    """
    if stream.logits is None:
        raise StateError("the stream is empty: feed at least one token before generating")
    if max_new_tokens < 1:
        raise StateError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    started = time.perf_counter()
    tokenizer, end_ids = stream.loaded.tokenizer, stream.loaded.end_ids
    unsaid = torch.tensor(sorted(stream.loaded.unnamed_ids - end_ids), dtype=torch.long)
    unsaid = unsaid.to(stream.logits.device)
    stop = [mended(text) for text in stop]
    detokenizer, stops = Detokenizer(tokenizer.decode), StopStrings(stop)
    uncertain = _Uncertain(stream, _undo_depth(stop))
    stream.cache.set_undo_depth(_undo_depth(stop))
    reason: FinishReason = "length"
    num_tokens = 0
    first_ids: list[int] | None = []  # until the first text has come
    try:
        while num_tokens < max_new_tokens:
            logits = stream.logits
            sayable = logits.index_fill(0, unsaid, float("-inf")) if len(unsaid) else logits
            token_id = sampler.choose(sayable, stream.recent_ids)
            if token_id in end_ids:
                reason = "end_token"
                break
            text = detokenizer.push(token_id)
            if first_ids is not None:
                first_ids.append(token_id)
                if text:
                    uncertain.lead = tokenizer.lead(first_ids, text)
                    first_ids = None
            certain, stopped = stops.push(text)
            if stopped:
                reason = "stop_string"
                num_tokens += uncertain.take_back(certain)
                if certain:
                    yield TextDelta(certain)
                break
            num_tokens += 1
            try:
                if certain:
                    yield TextDelta(certain)
            finally:
                stream.feed([token_id])
                is_complete = not detokenizer.num_pending
                uncertain.add(logits, text, certain, is_complete=is_complete)
            yield from uncertain.evicted()
    except GeneratorExit:
        uncertain.take_back()
        raise
    if reason != "stop_string":
        certain, _ = stops.push(detokenizer.flush())
        uncertain.keep()
        if rest := certain + stops.pending:
            yield TextDelta(rest)
    yield from uncertain.evicted()
    yield Finished(reason, num_tokens, time.perf_counter() - started)


def _undo_depth(stop: Sequence[str]) -> int:
    """Tokens that may have to be taken back: each has a byte of a stop string or a character."""
    return max((len(s.encode()) for s in stop), default=0) + MAX_UNFINISHED
