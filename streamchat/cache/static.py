"""One decode step in which nothing that changes is a Python number: what a CUDA graph can replay.

The contract is that of `layout.py`, computed on the device: slot, angles and the mask of what is
held follow from one tensor, the stream position, which the step itself moves on. Shapes never
change: attention runs over all slots from the first token on, and hides those not yet filled.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from streamchat.cache.face import StepCache
from streamchat.cache.geometry import CacheGeometry
from streamchat.cache.layout import Layout
from streamchat.errors import StateError
from streamchat.ops.attention import Part
from streamchat.ops.kernels import kernels_for
from streamchat.ops.rotary import rope_tables

WINDOW_MULTIPLE = 256
"""The window's buffer is padded to a multiple of this, which fused attention can cut evenly."""


@dataclass(frozen=True, slots=True)
class _Now:
    """What the layers of one step share, all of it on the device.

    Attributes:
        slot: Where the token goes, shape (1,), int64.
        cos: For its stream position, and for where its query stands as seen from the sinks; shape
            (2, head_dim).
        sin: Same shape.
        hidden_sinks: Sinks that have not come yet, as the kernels' `mask` makes it.
        hidden_window: Slots of the window that are not filled yet, or padding.
    """

    slot: Tensor
    cos: Tensor
    sin: Tensor
    hidden_sinks: Tensor
    hidden_window: Tensor


class StaticStep(StepCache):
    """The buffers of a sink cache, and a decode step over them that can be captured.

    Args:
        layout: Sizes of sinks and window.
        geometry: Layers, heads, frequencies, dtype, device; a device that has float64.
        batch_size: Rows.

    Attributes:
        keys: Shape (num_layers, batch, num_kv_heads, S + W, head_dim).
        values: Same shape.
        position: Stream position of the next token, shape (1,), int64.
        start_position: Position that the first token's angle was made for, shape (1,), int64.
    """

    def __init__(self, layout: Layout, geometry: CacheGeometry, batch_size: int) -> None:
        self.layout, self.geometry = layout, geometry
        g = geometry
        window = -(-layout.window_size // WINDOW_MULTIPLE) * WINDOW_MULTIPLE
        shape = (g.num_layers, batch_size, g.num_kv_heads, layout.sink_size + window, g.head_dim)
        self._keys = torch.zeros(shape, dtype=g.dtype, device=g.device)
        self._values = torch.zeros_like(self._keys)
        self.keys = self._keys[..., : layout.cache_size, :]
        self.values = self._values[..., : layout.cache_size, :]
        self.position = torch.zeros(1, dtype=torch.int64, device=g.device)
        self.start_position = torch.zeros_like(self.position)
        self._slots = torch.arange(shape[-2], device=g.device)
        self._inv_freq = g.frequencies(layout.cache_size)
        self._kernels = kernels_for(g.device, g.dtype)
        self._now: _Now | None = None
        super().__init__(self._keys, self._values)

    def begin(self, num_tokens: int) -> None:
        """Open a step.

        Raises:
            StateError: If it feeds another number of tokens than one.
        """
        if num_tokens != 1:
            raise StateError(f"a static step feeds 1 token, got {num_tokens}")
        sink_size, window_size = self.layout.sink_size, self.layout.window_size
        position = self.position
        in_window = sink_size + (position - sink_size) % window_size
        # Slots fill without a gap, so the newest filled one is also where the query stands as seen
        # from the sinks.
        newest = position.clamp(max=self.layout.cache_size - 1)
        angles_for = torch.cat((position, newest)) + self.start_position
        hidden = (self._slots > newest)[None]
        mask, dtype = self._kernels.mask, self.geometry.dtype
        self._now = _Now(
            torch.where(position < sink_size, position, in_window),
            *rope_tables(angles_for, self._inv_freq, interleaved=self.geometry.interleaved),
            mask(hidden[:, :sink_size], dtype),
            mask(hidden[:, sink_size:], dtype),
        )

    def attend(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None = None,
    ) -> Tensor:
        """Attention of the token in one layer, over what it may see.

        Args:
            layer_idx: Which layer.
            query: Shape (batch, num_heads, 1, head_dim), not rotated.
            key: Shape (batch, num_kv_heads, 1, head_dim), not rotated.
            value: Shape (batch, num_kv_heads, 1, head_dim).
            scaling: Factor on the scores; head_dim ** -0.5 by default.

        Returns:
            Shape (batch, num_heads, 1, head_dim).

        Raises:
            StateError: Outside a step.
        """
        now = self._now
        if now is None:
            raise StateError("attend was called outside a step")
        g, num_sinks = self.geometry, self.layout.sink_size
        if scaling is None:
            scaling = float(g.head_dim**-0.5)
        num_heads = query.shape[1]
        # Queries and keys turned at once, by both angles: a small kernel costs a GPU its launch.
        turned = torch.cat((query, key.to(g.dtype)), dim=1)
        if layer_idx in g.unrotated_layers:
            turned = turned.float().expand(-1, -1, 2, -1)
        else:
            turned = g.rotate(layer_idx, turned, (now.cos, now.sin))
        for_window, for_sinks = turned[:, :num_heads, :1], turned[:, :num_heads, 1:]
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys.index_copy_(2, now.slot, turned[:, num_heads:, :1].to(g.dtype))
        values.index_copy_(2, now.slot, value.to(g.dtype))
        sinks, window = slice(0, num_sinks), slice(num_sinks, None)
        parts = [Part(for_window, keys[:, :, window], values[:, :, window], now.hidden_window)]
        if num_sinks:
            parts.append(Part(for_sinks, keys[:, :, sinks], values[:, :, sinks], now.hidden_sinks))
        return self._kernels.merged(parts, scaling).to(query.dtype)

    def commit(self) -> None:
        """Close the step: move the position on."""
        self._now = None
        self.position += 1

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - the same for all
        """0 at every step: what transformers makes of it must not change."""
        return 0

    def reset(self) -> None:
        """Go back to the start of a stream."""
        self._now = None
        self.position.zero_()
