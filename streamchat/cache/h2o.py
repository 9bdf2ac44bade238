"""H2O: the newest tokens, and the heavy hitters, which have drawn most attention so far.

Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
Models" (arXiv:2306.14048), section 4. Half of the cache is the newest, half heavy hitters, as
there; the query heads of a group vote together. Token by token and in any chunk the same tokens
stay: a chunk is scanned query by query, and each evicts for itself.
"""

import torch
from torch import Tensor

from streamchat.cache.geometry import CacheGeometry
from streamchat.cache.scored import Ask, ScoredCache
from streamchat.config import CacheConfig


def num_newest(cache_size: int) -> int:
    """How many of the held tokens are the newest, whatever attention they draw; at least one."""
    return max(1, cache_size // 2)


class H2OCache(ScoredCache):
    """Of each head the newest half of the cache, and its heavy hitters.

    A token keeps its slot. Its number among those that a head holds stands in `numbers`, shape
    (num_layers, batch, num_kv_heads, cache_size), int64.
    """

    def __init__(
        self,
        config: CacheConfig,
        geometry: CacheGeometry,
        *,
        batch_size: int = 1,
        undo_depth: int = 1,
    ) -> None:
        super().__init__(config, geometry, batch_size=batch_size, undo_depth=undo_depth)
        self.numbers = torch.zeros_like(self.scores, dtype=torch.int64)

    @property
    def num_held(self) -> int:
        """Tokens that each head holds."""
        return min(self.num_seen, self.config.cache_size)

    def _state(self) -> dict[str, Tensor]:
        return {**super()._state(), "numbers": self.numbers}

    def _attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, ask: Ask
    ) -> Tensor:
        """See `ScoredCache._attend`."""
        size, num_tokens = self.config.cache_size, key.shape[2]
        scores, numbers = self.scores[layer_idx], self.numbers[layer_idx]
        outputs = []
        for index in range(num_tokens):
            num_before = min(self.num_seen + index, size)
            if num_tokens == 1:
                self._keep(scores, numbers)
            slot = self._slot(layer_idx, num_before)
            rows = slot[..., None].expand(*slot.shape, key.shape[-1])
            for buffer, new in ((self.keys, key), (self.values, value)):
                if num_tokens == 1:
                    self._keep_rows(buffer[layer_idx], rows)
                buffer[layer_idx].scatter_(2, rows, new[:, :, index : index + 1])
            num_held = min(num_before + 1, size)
            numbers.scatter_(2, slot, num_held - 1)
            scores.scatter_(2, slot, 0.0)
            newest = slice(num_held - 1, num_held)
            weights = ask.weights(
                self._rotated_query(layer_idx, query[:, :, :, index : index + 1], newest),
                self._rotated_keys(layer_idx, num_held, numbers),
            )
            scores[:, :, :num_held] += weights.sum(dim=(2, 3))
            held = self.values[layer_idx, :, :, None, :num_held]
            outputs.append(weights @ held.float())
        return torch.cat(outputs, dim=3)

    def _slot(self, layer_idx: int, num_held: int) -> Tensor:
        """A free slot for each head, shape (batch, num_kv_heads, 1); evicts where there is none."""
        scores, numbers = self.scores[layer_idx], self.numbers[layer_idx]
        size = self.config.cache_size
        if num_held < size:
            return torch.full((*scores.shape[:2], 1), num_held, device=scores.device)
        # With the token to come, the newest are those from this number on.
        is_newest = numbers > size - num_newest(size)
        slot = scores.masked_fill(is_newest, float("inf")).argmin(dim=2, keepdim=True)
        numbers -= (numbers > numbers.gather(2, slot)).long()
        return slot

    def _keep_rows(self, buffer: Tensor, rows: Tensor) -> None:
        assert self._step is not None  # noqa: S101 - for mypy
        before = buffer.gather(2, rows)

        def put_back() -> None:
            buffer.scatter_(2, rows, before)

        self._step.undo.append(put_back)
