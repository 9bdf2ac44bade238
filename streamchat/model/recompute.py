"""The newest W tokens, computed anew at each step: the paper's sliding window with re-computation.

Xiao et al. 2023 (arXiv:2309.17453), figure 1 (c). Every token's logits are those of the model's own
forward pass over the last W tokens, at positions 0 to W - 1. That is exact for any model whose own
forward pass is, learned absolute positions among them, and takes O(W) forward work for each token.
What is kept is the ids; while nothing has been evicted yet, the model's own cache saves work.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from streamchat.cache.layout import Layout
from streamchat.cache.snapshot import CacheSnapshot
from streamchat.config import CacheConfig
from streamchat.errors import StateError
from streamchat.model.compat import logits_of
from streamchat.model.dispatch import home_of

TOKENS_AT_ONCE = 2048
"""Windows are computed side by side as long as their tokens are no more than these."""


class RecomputeCache:
    """The ids of the newest W tokens, and the forward passes over them.

    Args:
        model: A transformers causal LM.
        config: Its cache size is W.
        batch_size: Rows.
    """

    def __init__(self, model: Any, config: CacheConfig, *, batch_size: int = 1) -> None:
        self.model, self.config, self.batch_size = model, config, batch_size
        self.layout = Layout(0, config.cache_size)
        self.num_seen = 0
        # The newest ids; as many more as may be taken back.
        self._ids = torch.zeros((batch_size, 0), dtype=torch.int64, device=home_of(model))
        self._undo_depth = 1
        self._num_single = 0  # newest tokens that came one at a time
        # What the model itself keeps of the first tokens, as long as all of them are held.
        self._own: Any = None
        self._num_own = 0

    def forward(self, ids: Tensor, num_logits: int = 1) -> Tensor:
        """Feed tokens.

        Args:
            ids: Shape (batch, num_tokens), int64, on the model's device.
            num_logits: For how many of the last tokens logits are computed; each one is a forward
                pass of its own once W tokens have been seen.

        Returns:
            Logits, shape (batch, num_logits, vocab_size).
        """
        num_tokens, size = ids.shape[1], self.config.cache_size
        known = torch.cat((self._ids, ids), dim=1)
        num_logits = min(num_logits, num_tokens)
        before = self.num_seen + num_tokens - num_logits  # tokens before the first that is asked
        num_dense = max(0, min(num_tokens + self.num_seen, size) - before)
        parts = []
        if num_dense:  # these see all tokens from the first on
            parts.append(self._dense(known, ids, num_dense, before + num_dense))
        # The others see a full window each; by their end in `known`.
        ends = range(known.shape[1] - num_logits + num_dense + 1, known.shape[1] + 1)
        parts += self._windows(known, ends)
        self.num_seen += num_tokens
        self._num_single = self._num_single + 1 if num_tokens == 1 else 0
        self._ids = known[:, -(size + self._undo_depth) :]
        if self.num_seen >= size:
            self._forget_own()
        return torch.cat(parts, dim=1)

    def _dense(self, known: Tensor, ids: Tensor, num_logits: int, num_tokens: int) -> Tensor:
        """Logits of the last of the stream's first `num_tokens` tokens."""
        if self._own is None or self._num_own != self.num_seen:
            self._own, self._num_own = DynamicCache(config=self.model.config), 0
        own, first = self._own, known.shape[1] - ids.shape[1] - self.num_seen + self._num_own
        self._own = None  # an interrupted pass leaves it in no known state
        new = known[:, first : first + num_tokens - self._num_own]
        logits = logits_of(self.model, new, own, num_logits)
        self._own, self._num_own = own, num_tokens
        return logits[:, -num_logits:]

    def _windows(self, known: Tensor, ends: range) -> list[Tensor]:
        """Logits after each of these windows, each shape (batch, 1, vocab_size)."""
        size, rows = self.config.cache_size, self.batch_size
        at_once = max(1, TOKENS_AT_ONCE // (size * rows))
        logits = []
        for start in range(0, len(ends), at_once):
            some = ends[start : start + at_once]
            windows = torch.cat([known[:, end - size : end] for end in some])
            with torch.no_grad():
                out = self.model(windows, use_cache=False, logits_to_keep=1).logits
            logits += list(out[:, -1:].split(rows))
        return logits

    def _forget_own(self) -> None:
        self._own, self._num_own = None, 0

    @property
    def num_held(self) -> int:
        """Tokens that the next one is computed from, W at most."""
        return self.layout.num_held(self.num_seen)

    @property
    def num_evicted(self) -> int:
        """Tokens that have left."""
        return self.layout.num_evicted(self.num_seen)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated: ids, and what the model itself keeps until the window is full."""
        layers = [] if self._own is None else self._own.layers
        own = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        return int(self._ids.nbytes + own)

    def set_undo_depth(self, depth: int) -> None:
        """From now on keep what is needed to take back `depth` single-token steps (at least 1)."""
        self._undo_depth = max(1, depth)

    def rewind(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` tokens, which were fed one at a time.

        Raises:
            StateError: If they are more than the undo log holds.
        """
        # What is left must be a window's worth of ids, or all there were.
        spare = self._ids.shape[1] - min(self.num_seen, self.config.cache_size)
        is_whole = self._ids.shape[1] == self.num_seen
        most = min(self._num_single, self._undo_depth, self.num_seen if is_whole else spare)
        if not 0 <= num_tokens <= most:
            raise StateError(f"can take back {most} tokens, asked for {num_tokens}")
        if num_tokens:
            self._forget_own()
            self.num_seen -= num_tokens
            self._num_single -= num_tokens
            self._ids = self._ids[:, : self._ids.shape[1] - num_tokens]

    def snapshot(self) -> CacheSnapshot:
        """Copy the state: the ids."""
        ids = self._ids[:, self._ids.shape[1] - self.num_held :].clone()
        return CacheSnapshot(self.config, self.num_seen, 0, {"ids": ids})

    def restore(self, snapshot: CacheSnapshot) -> None:
        """Bring back the state of a snapshot of a cache of the same policy and sizes.

        Raises:
            StateError: If the snapshot comes from another one.
        """
        ids = snapshot.tensors.get("ids")
        if (
            ids is None
            or not self.config.holds_like(snapshot.config)
            or ids.shape != (self.batch_size, self.layout.num_held(snapshot.num_seen))
        ):
            raise StateError("the snapshot comes from a cache of other sizes")
        self._forget_own()
        self._num_single = 0
        self.num_seen, self._ids = snapshot.num_seen, ids.clone()

    def fork(self) -> "RecomputeCache":
        """An independent copy."""
        copy = RecomputeCache(self.model, self.config, batch_size=self.batch_size)
        copy.restore(self.snapshot())
        return copy
