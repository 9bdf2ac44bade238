"""Every token is kept: what a stream is without a policy, until it ends.

The same keys, angles and attention as in the sink cache, whose window is as long as a stream may
be: the trained length, or what memory holds. Only the buffers differ, which grow with the stream.
"""

import torch

from streamchat.cache.sink import SinkCache
from streamchat.errors import StreamFullError

FIRST_SLOTS = 1024
"""Slots at the start; doubled whenever they are full."""


class DenseCache(SinkCache):
    """Keys and values of all tokens, as many as `config.window_size` at most.

    A step that would go beyond that raises `StreamFullError` and changes nothing.
    """

    def _first_slots(self) -> int:
        return min(FIRST_SLOTS, self.config.cache_size)

    def _reserve(self, num_tokens: int) -> None:
        needed, limit = self.num_seen + num_tokens, self.config.cache_size
        if needed > limit:
            raise StreamFullError(
                f"the stream is full: --policy dense keeps every token, {limit:,} at most, and "
                f"{needed:,} were fed; --policy sink has no end"
            )
        num_slots = self.keys.shape[-2]
        if needed <= num_slots:
            return
        while num_slots < needed:
            num_slots *= 2
        shape = (*self.keys.shape[:3], min(num_slots, limit), self.keys.shape[-1])
        held = slice(0, self.num_held)
        grown = []
        for buffer in self.buffers:
            larger = torch.zeros(shape, dtype=buffer.dtype, device=buffer.device)
            larger[:, :, :, held] = buffer[:, :, :, held]
            grown.append(larger)
        self._point_to(*grown)
