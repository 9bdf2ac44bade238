"""H2O: the newest tokens, and the heavy hitters, which have drawn most attention so far.

Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
Models" (arXiv:2306.14048), section 4. Half of the cache is the newest, half heavy hitters, as
there; the query heads of a group vote together. Token by token and in any chunk the same tokens
stay: a chunk is scanned query by query, and each evicts for itself.
"""

from functools import partial

import torch
from torch import Tensor

from streamchat.cache.scored import Ask, ScoredCache
from streamchat.ops.attention import weighted_sum


def num_newest(cache_size: int) -> int:
    """How many of the held tokens are the newest, whatever attention they draw; at least one."""
    return max(1, cache_size // 2)


class H2OCache(ScoredCache):
    """Of each head the newest half of the cache, and its heavy hitters.

    A token's slot is its number among those held: those behind an evicted one move up.
    """

    def _attend_kept(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, ask: Ask
    ) -> Tensor:
        """See `ScoredCache._attend_kept`."""
        size, num_tokens = self.config.cache_size, key.shape[2]
        keys, values, scores = (tensor[layer_idx] for tensor in self._state().values())
        outputs = []
        for index in range(num_tokens):
            slot = min(self.num_seen + index, size - 1)
            if num_tokens == 1:
                self._keep(scores)
            if self.num_seen + index >= size:
                self._evict(layer_idx, is_kept=num_tokens == 1)
            keys[:, :, slot], values[:, :, slot] = key[:, :, index], value[:, :, index]
            scores[:, :, slot] = 0
            newest, num_held = slice(slot, slot + 1), slot + 1
            weights = ask.weights(
                self._rotated_query(layer_idx, query[:, :, :, index : index + 1], newest),
                self._rotated_keys(layer_idx, num_held),
            )
            scores[:, :, :num_held] += weights.sum(dim=(2, 3))
            outputs.append(weighted_sum(weights, values[:, :, :num_held]))
        return torch.cat(outputs, dim=3)

    def _evict(self, layer_idx: int, *, is_kept: bool) -> None:
        """Let go of what has drawn least attention, of those that the next token makes old.

        Args:
            layer_idx: Which layer.
            is_kept: Whether it may be taken back.
        """
        size = self.config.cache_size
        buffers = [tensor[layer_idx] for tensor in self._state().values()]
        chosen = self.scores[layer_idx, :, :, : size - num_newest(size) + 1].argmin(dim=2)
        for row, of_row in enumerate(chosen.tolist()):
            for head, slot in enumerate(of_row):
                for buffer in buffers:
                    held = buffer[row, head]
                    if is_kept:
                        self._open_undo.append(partial(_insert, held, slot, held[slot].clone()))
                    held[slot:-1] = held[slot + 1 :].clone()


def _insert(held: Tensor, slot: int, row: Tensor) -> None:
    """Put a row back in its place; those behind it move down, the last is lost."""
    held[slot + 1 :] = held[slot:-1].clone()
    held[slot] = row
