"""SnapKV, made rolling: the tokens that the newest ones attend to.

Li et al. 2024, "SnapKV: LLM Knows What You are Looking for Before Generation" (arXiv:2404.14469),
section 4: the last queries of a prompt vote with their attention for what each head keeps; votes
are pooled, so that neighbours of what is chosen stay as well; the voters stay too. The paper
compresses a prompt once. A stream has no end, so here it is done again whenever the cache is full,
which depends on the stream position alone: a stream cut in another way keeps the same tokens.
"""

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from streamchat.cache.scored import Ask, ScoredCache
from streamchat.ops.attention import weighted_sum

MAX_VOTERS = 32
"""Queries that vote, the observation window of the paper (section 5)."""

POOL_SIZE = 5
"""Neighbours that votes are averaged over."""

MAX_BLOCK = 128
"""Queries that are scored at once: bounds the score matrix."""


class Schedule:
    """When a cache is compressed, and to how much, in integers.

    Args:
        cache_size: Tokens that a head holds at most.

    Attributes:
        num_freed: Tokens that a compression lets go: the next one comes after as many.
        num_voters: Newest tokens that vote, and stay.
    """

    def __init__(self, cache_size: int) -> None:
        self.cache_size = cache_size
        self.num_freed = max(1, cache_size // 4)
        # With the freed ones, and one kept besides, no more than there are.
        self.num_voters = max(0, min(MAX_VOTERS, self.num_freed, cache_size - self.num_freed))

    @property
    def num_kept(self) -> int:
        """Tokens held after a compression."""
        return self.cache_size - self.num_freed

    def num_held(self, num_seen: int) -> int:
        """Tokens held after `num_seen` tokens have been fed."""
        if num_seen <= self.cache_size:
            return num_seen
        return self.num_kept + (num_seen - self.cache_size - 1) % self.num_freed + 1


class SnapKVCache(ScoredCache):
    """Of each head the tokens with most votes, and all that came since the vote.

    A token's slot is its number among those held: a compression moves what stays to the front.
    `scores` are the votes so far.
    """

    @property
    def _schedule(self) -> Schedule:
        return Schedule(self.config.cache_size)

    def _held_of(self, num_seen: int) -> int:
        return self._schedule.num_held(num_seen)

    def _attend_kept(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, ask: Ask
    ) -> Tensor:
        """See `ScoredCache._attend_kept`."""
        schedule, num_tokens = self._schedule, key.shape[2]
        outputs, done = [], 0
        while done < num_tokens:
            num_before = schedule.num_held(self.num_seen + done)
            if num_before == schedule.cache_size:
                if num_tokens == 1:
                    self._keep(*(tensor[layer_idx] for tensor in self._state().values()))
                self._compress(layer_idx, schedule)
                num_before = schedule.num_kept
            elif num_tokens == 1:
                self._keep(self.scores[layer_idx])
            # Voters apart from the others: they alone leave votes.
            limit = schedule.cache_size - schedule.num_voters
            limit = schedule.cache_size if num_before >= limit else limit
            stop = min(num_tokens, done + limit - num_before, done + MAX_BLOCK)
            run, slots = slice(done, stop), slice(num_before, num_before + stop - done)
            self.keys[layer_idx, :, :, slots] = key[:, :, run]
            self.values[layer_idx, :, :, slots] = value[:, :, run]
            self.scores[layer_idx, :, :, slots] = 0
            numbers = torch.arange(slots.stop, device=key.device)
            weights = ask.weights(
                self._rotated_query(layer_idx, query[:, :, :, run], slots),
                self._rotated_keys(layer_idx, slots.stop),
                numbers > numbers[slots, None],
            )
            if slots.start >= schedule.cache_size - schedule.num_voters:
                self.scores[layer_idx, :, :, : slots.stop] += weights.sum(dim=(2, 3))
            outputs.append(weighted_sum(weights, self.values[layer_idx, :, :, : slots.stop]))
            done = stop
        return torch.cat(outputs, dim=3)

    def _compress(self, layer_idx: int, schedule: Schedule) -> None:
        """Keep what has most votes, and the voters."""
        num_others = schedule.cache_size - schedule.num_voters
        votes = self.scores[layer_idx, :, :, :num_others]
        pooled = avg_pool1d(votes, POOL_SIZE, stride=1, padding=POOL_SIZE // 2)
        chosen = pooled.topk(schedule.num_kept - schedule.num_voters, dim=2).indices
        for buffer in (self.keys[layer_idx], self.values[layer_idx]):
            rows = chosen.sort(dim=2).values[..., None].expand(*chosen.shape, buffer.shape[-1])
            kept = torch.cat((buffer.gather(2, rows), buffer[:, :, num_others:]), dim=2)
            buffer[:, :, : schedule.num_kept] = kept
        self.scores[layer_idx] = 0
