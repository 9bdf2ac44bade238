"""Decode: choose a token, say its text, feed it, until something ends it.

What has been shown and what the cache holds are the same at every moment the caller has control.
Closing the generator after a text event feeds the token that was shown, and a stop string's tokens
are taken back out of the cache.
"""

import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
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
from streamchat.engine.detokenize import Detokenizer
from streamchat.engine.stops import StopStrings
from streamchat.errors import StateError
from streamchat.events import Event, Evicted, Finished, FinishReason, TextDelta

if TYPE_CHECKING:
    from streamchat.engine.stream import Stream


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
            self._processors.append(RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
        if config.temperature > 0:
            self._processors.append(TemperatureLogitsWarper(float(config.temperature)))
            if config.top_k:
                self._processors.append(TopKLogitsWarper(config.top_k))
            if config.top_p < 1:
                self._processors.append(TopPLogitsWarper(config.top_p))
            if config.min_p > 0:
                self._processors.append(MinPLogitsWarper(config.min_p))

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
class _FedToken:
    """A fed token, what `logits` was before it, and how much text it completed."""

    logits_before: Tensor
    num_chars: int | None  # None while its character is unfinished


class _Uncertain:
    """The newest fed tokens whose text has not all been shown: a stop string may still take them.

    Args:
        depth: How many the cache can take back; older ones stay.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._tokens: deque[_FedToken] = deque()
        self._text = ""
        self._num_shown = 0

    def add(self, logits_before: Tensor, text: str, shown: str) -> None:
        """A token was fed; it completed `text`, and `shown` is what its coming made certain."""
        self._tokens.append(_FedToken(logits_before, None))
        if text:
            for token in self._tokens:
                token.num_chars = token.num_chars or 0
            self._tokens[-1].num_chars = len(text)
        self._text += text
        self._num_shown += len(shown)
        while self._tokens and (len(self._tokens) > self._depth or self._is_shown(self._tokens[0])):
            num_chars = self._tokens.popleft().num_chars or 0
            self._text = self._text[num_chars:]
            self._num_shown = max(0, self._num_shown - num_chars)

    def _is_shown(self, token: _FedToken) -> bool:
        return token.num_chars is not None and token.num_chars <= self._num_shown

    def take_back(self, stream: "Stream", last_words: str) -> int:
        """Leave in the cache only what is shown of these tokens.

        Args:
            stream: The stream they were fed to.
            last_words: Text that is shown with the stop.

        Returns:
            By how many tokens the stream has grown (below 0: shrunk).
        """
        shown = self._text[: self._num_shown] + last_words
        if self._tokens:
            stream.rewind(len(self._tokens), self._tokens[0].logits_before)
        ids = stream.loaded.tokenizer.encode_continuation(shown)
        stream.feed(ids)
        return len(ids) - len(self._tokens)


def generate(
    stream: "Stream", max_new_tokens: int, sampler: Sampler, stop: Sequence[str]
) -> Generator[Event, None, None]:
    """Continue a stream.

    Ends with `Finished`: at an end token, which is not fed; at a stop string, which is neither
    shown nor left in the cache; or after `max_new_tokens`.

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
    detokenizer = Detokenizer(tokenizer.decode)
    stops, uncertain = StopStrings(stop), _Uncertain(_undo_depth(stop))
    stream.cache.set_undo_depth(_undo_depth(stop))
    reason: FinishReason = "length"
    num_tokens = 0
    while num_tokens < max_new_tokens:
        logits = stream.logits
        token_id = sampler.choose(logits, stream.recent_ids)
        if token_id in end_ids:
            reason = "end_token"
            break
        text = detokenizer.push(token_id)
        certain, stopped = stops.push(text)
        if stopped:
            reason = "stop_string"
            num_tokens += uncertain.take_back(stream, certain)
            if certain:
                yield TextDelta(certain)
            break
        evicted = stream.cache.layout.evicted_by(stream.position, 1)
        num_tokens += 1
        try:
            if certain:
                yield TextDelta(certain)
        finally:
            stream.feed([token_id])
            uncertain.add(logits, text, certain)
        if evicted:
            yield Evicted(evicted.start, evicted.stop - 1)
    if reason != "stop_string":
        certain, _ = stops.push(detokenizer.flush())
        if rest := certain + stops.pending:
            yield TextDelta(rest)
    yield Finished(reason, num_tokens, time.perf_counter() - started)


def _undo_depth(stop: Sequence[str]) -> int:
    """Tokens that may have been fed before a stop string is complete: each has a byte of it."""
    return max((len(s.encode()) for s in stop), default=0) + 1
