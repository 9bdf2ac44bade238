"""One endless stream of tokens through one model.

Feeding is exact: however the ids are cut into calls, and the calls into chunks, the numbers are the
same within rounding. A `Stream` has one row, though its cache could have more.
"""

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamchat.cache.snapshot import CacheSnapshot
from streamchat.config import MAX_PENALTY_WINDOW, CacheConfig, SamplingConfig
from streamchat.engine import generate
from streamchat.errors import ConfigError, StateError
from streamchat.events import Event, StreamStats
from streamchat.model.load import LoadedModel
from streamchat.model.policies import forward, make_cache

CHUNK_SIZE = 256
"""Tokens fed in one forward pass: logits of a scored chunk stay small, and larger chunks gain
little on a CPU."""

RECENT_CACHES = 2
"""Newest ids that a stream remembers to feed again, in caches' worth."""

SCORE_ROWS = 64
"""Logit rows turned into losses at once: bounds the temporary of the log-sum-exp."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """A stream at one moment; `Stream.restore` goes back to it.

    Attributes:
        cache: What the model holds.
        logits: After the newest token.
        recent_ids: The newest ids.
    """

    cache: CacheSnapshot
    logits: Tensor | None
    recent_ids: list[int]

    def pack(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What JSON can say, and tensors: for a disk."""
        tensors = {f"cache.{name}": tensor for name, tensor in self.cache.tensors.items()}
        if self.logits is not None:
            tensors["logits"] = self.logits
        meta = {
            "num_seen": self.cache.num_seen,
            "start_position": self.cache.start_position,
            "recent_ids": self.recent_ids,
        }
        return meta, tensors

    @classmethod
    def unpack(
        cls, config: CacheConfig, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> "StreamState":
        """The state that `pack` took apart; whoever reads it checks that `config` is its own."""
        held = {
            name.removeprefix("cache."): tensor
            for name, tensor in tensors.items()
            if name.startswith("cache.")
        }
        snapshot = CacheSnapshot(config, meta["num_seen"], meta["start_position"], held)
        return cls(snapshot, tensors.get("logits"), list(meta["recent_ids"]))


class Stream:
    """Tokens fed so far, as the model sees them.

    Args:
        loaded: A model from `streamchat.load`.
        config: Policy, and sizes of sinks and window.
        chunk_size: Tokens fed in one forward pass at most.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: CacheConfig | None = None,
        *,
        chunk_size: int = CHUNK_SIZE,
    ) -> None:
        if chunk_size < 1:
            raise ConfigError(f"chunk_size must be at least 1, got {chunk_size}")
        self.loaded = loaded
        self.chunk_size = chunk_size
        self.cache = make_cache(loaded.model, config)
        # Logits after the newest token, shape (vocab_size,); None at the start of a stream.
        self.logits: Tensor | None = None
        # The newest ids: for the repetition penalty, and to feed again what was retained.
        self.recent_ids: deque[int] = deque(
            maxlen=RECENT_CACHES * self.cache.config.cache_size + MAX_PENALTY_WINDOW
        )

    @property
    def position(self) -> int:
        """Stream position of the next token: the number of tokens fed."""
        return self.cache.num_seen

    def feed(self, ids: Sequence[int]) -> None:
        """Append tokens.

        Args:
            ids: Token ids; may be empty.
        """
        for chunk in self._chunks(ids):
            self.logits = self._forward(chunk, num_logits=1)[-1]

    def score(self, ids: Sequence[int]) -> list[float | None]:
        """Append tokens, and say how surprising each was.

        Args:
            ids: Token ids; may be empty.

        Returns:
            Negative log-likelihood of each token given all that the model could see before it, in
            nats. None for the first token of a stream, which nothing predicts.
        """
        scores: list[float | None] = []
        for chunk in self._chunks(ids):
            before = self.logits
            logits = self._forward(chunk, num_logits=len(chunk))
            first = None if before is None else _losses(before[None], chunk[:1])[0]
            scores += [first, *_losses(logits[:-1], chunk[1:])]
            self.logits = logits[-1].clone()  # not a view: it would keep the whole chunk's logits
        return scores

    def generate(
        self,
        *,
        max_new_tokens: int = 256,
        sampling: SamplingConfig | None = None,
        stop: Sequence[str] = (),
    ) -> Generator[Event, None, None]:
        """Continue the stream; see `generate.generate`."""
        sampler = generate.Sampler(sampling or SamplingConfig())
        return generate.generate(self, max_new_tokens, sampler, stop)

    def rewind(self, num_tokens: int, logits_before: Tensor) -> None:
        """Take back the last tokens, which were fed one at a time.

        Args:
            num_tokens: How many.
            logits_before: What `logits` was before the first of them was fed.

        Raises:
            StateError: If the cache did not keep what that needs (its `set_undo_depth`).
        """
        self.cache.rewind(num_tokens)
        self.logits = logits_before
        for _ in range(num_tokens):
            self.recent_ids.pop()

    def fork(self) -> "Stream":
        """An independent copy, O(S + W): ask it something without disturbing this stream."""
        copy = Stream(self.loaded, self.cache.config, chunk_size=self.chunk_size)
        copy.restore(self.snapshot())
        return copy

    def snapshot(self) -> StreamState:
        """The state at this moment, O(S + W), for `restore`."""
        return StreamState(self.cache.snapshot(), self.logits, list(self.recent_ids))

    def restore(self, state: StreamState) -> None:
        """Go to a state of a stream with the same sizes."""
        self.cache.restore(state.cache)
        self.logits = None if state.logits is None else state.logits.to(self.loaded.device)
        self.recent_ids.clear()
        self.recent_ids.extend(state.recent_ids)

    def stats(self) -> StreamStats:
        """Where the stream stands."""
        cache = self.cache
        return StreamStats(
            num_held=cache.num_held,
            cache_size=cache.config.cache_size,
            num_pinned=min(cache.config.sink_size, cache.num_held),
            num_evicted=cache.num_evicted,
            num_tokens=cache.num_seen,
        )

    def _chunks(self, ids: Sequence[int]) -> Iterator[Sequence[int]]:
        vocab_size = self.loaded.model.config.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise StateError(
                f"token ids must be in [0, {vocab_size}), got {min(ids)} to {max(ids)}"
            )
        for start in range(0, len(ids), self.chunk_size):
            yield ids[start : start + self.chunk_size]

    def _forward(self, ids: Sequence[int], num_logits: int) -> Tensor:
        """Feed one chunk; logits of its last tokens, shape (num_logits, vocab_size)."""
        tokens = torch.tensor([list(ids)], device=self.loaded.device)
        logits = forward(self.loaded.model, tokens, self.cache, num_logits)[0]
        self.recent_ids.extend(ids)
        return logits


def _losses(logits: Tensor, ids: Sequence[int]) -> list[float]:
    """Negative log-likelihood of each id, in nats, from logits of shape (len(ids), vocab_size)."""
    losses: list[float] = []
    for start in range(0, len(ids), SCORE_ROWS):
        rows = logits[start : start + SCORE_ROWS].float()
        targets = torch.tensor(ids[start : start + SCORE_ROWS], device=rows.device)
        losses += torch.nn.functional.cross_entropy(rows, targets, reduction="none").tolist()
    return losses
