"""What the first tokens of a prompt draw: a cache that looks at attention and keeps nothing else.

A prompt goes through the model whole, with all of it in sight. In each layer the weights are
computed as a matrix, which a cache for streaming never makes, and summed up before the next one.
"""

import torch
from torch import Tensor

from streamchat.cache.face import StepCache
from streamchat.cache.geometry import CacheGeometry, Tables
from streamchat.errors import StateError
from streamchat.ops.attention import attention_weights


class RecordingCache(StepCache):
    """One prompt, fed in one step.

    Args:
        geometry: Layers, heads, frequencies, dtype, device.
        num_first: First tokens whose attention is recorded.

    Attributes:
        drawn: By layer, the weight that each of the first tokens gets, shape (num_heads,
            num_first): the mean over the newer half of the queries that see the very first.
    """

    def __init__(self, geometry: CacheGeometry, num_first: int) -> None:
        self.geometry, self.num_first = geometry, num_first
        self._num_tokens = 0
        self.drawn: list[Tensor] = []
        nothing = torch.zeros((geometry.num_layers, 0), device=geometry.device)
        super().__init__(nothing, nothing)

    def begin(self, num_tokens: int) -> None:
        """Open the step.

        Raises:
            StateError: If there was one already.
        """
        if self.num_seen:
            raise StateError("a recording cache takes one prompt, whole")
        self._num_tokens = num_tokens
        self.drawn.clear()

    def attend(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None = None,
        sink_logit: Tensor | None = None,
    ) -> Tensor:
        """Attention of the prompt in one layer; see `SinkCache.attend`."""
        g, length = self.geometry, self._num_tokens
        tables = self._tables(layer_idx)
        groups = (key.shape[0], g.num_kv_heads, -1, *query.shape[2:])
        numbers = torch.arange(length, device=query.device)
        distance = numbers[:, None] - numbers
        hidden = (distance < 0) | (distance >= self.num_visible(layer_idx))
        scaled = g.scale(layer_idx, query.float(), range(length))
        sink_logit = g.extra_term(sink_logit, query)
        weights = attention_weights(
            g.rotate(layer_idx, scaled, tables).reshape(groups),
            g.rotate(layer_idx, key, tables),
            g.head_dim**-0.5 if scaling is None else scaling,
            hidden,
            g.softcap,
            None if sink_logit is None else sink_logit.view(g.num_kv_heads, -1),
            self._biases(),
        )
        by_head = weights[0, ..., self.queries(layer_idx), : self.num_first].flatten(0, 1)
        self.drawn.append(by_head.mean(dim=1).cpu())
        out = weights @ value.float()[:, :, None]
        return out.reshape(query.shape).to(query.dtype)

    def commit(self) -> None:
        """Close the step."""
        self.num_seen = self._num_tokens

    def num_visible(self, layer_idx: int) -> int:
        """Newest tokens that a query of this layer sees, itself included."""
        native = self.geometry.native_window if layer_idx in self.geometry.local_layers else None
        return self._num_tokens if native is None else min(native, self._num_tokens)

    def queries(self, layer_idx: int) -> slice:
        """Those whose weights are averaged in this layer."""
        num_visible = self.num_visible(layer_idx)
        return slice(num_visible // 2, num_visible)

    def _tables(self, layer_idx: int) -> Tables:
        """RoPE tables for 0, 1, 2, …, as the layer turns by them."""
        g, length = self.geometry, self._num_tokens
        is_local = layer_idx in g.local_layers
        return g.tables(range(length), (g.local_frequencies if is_local else g.frequencies)(length))

    def _biases(self) -> Tensor | None:
        g = self.geometry
        if g.alibi is None:
            return None
        table = g.alibi(self._num_tokens).float().to(g.device)
        return table.view(g.num_kv_heads, -1, 1, self._num_tokens)

    def reset(self) -> None:
        """Forget everything."""
        self.num_seen = 0
        self.drawn.clear()
