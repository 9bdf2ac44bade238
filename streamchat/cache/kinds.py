"""Kinds of layers: which ones hold the same tokens, and turn by the same angles."""

from dataclasses import dataclass

import torch
from torch import Tensor

from streamchat.cache.geometry import CacheGeometry
from streamchat.cache.layout import Layout


@dataclass(frozen=True, slots=True)
class Kind:
    """Layers that hold the same tokens and turn by the same angles.

    Attributes:
        layers: Index of these layers in the buffers.
        layout: What they hold, and where.
        inv_freq: RoPE frequencies, shape (rotary_dim // 2,), float64.
    """

    layers: Tensor | slice
    layout: Layout
    inv_freq: Tensor


def kinds_of_layers(geometry: CacheGeometry, layout: Layout) -> tuple[list[Kind], list[int]]:
    """The kinds of layers, and of which kind each layer is. The first one holds `layout`.

    A layer with a native window holds what it was trained to see, and no sinks, if that is less
    than the cache holds; otherwise it is bounded like any other.
    """
    g, native, size = geometry, geometry.native_window, layout.cache_size
    if not g.local_layers:
        return [Kind(slice(None), layout, g.frequencies(size))], [0] * g.num_layers
    is_local = [layer in g.local_layers for layer in range(g.num_layers)]
    local_layout = Layout(0, native) if native is not None and native < size else layout
    index = torch.tensor(is_local, device=g.device)
    kinds = [
        Kind((~index).nonzero()[:, 0], layout, g.frequencies(size)),
        Kind(index.nonzero()[:, 0], local_layout, g.local_frequencies(size)),
    ]
    return kinds, [int(local) for local in is_local]
