"""Decode steps of a quantized model of the Llama layout, compiled for the CPU."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from streamchat.cache.geometry import CacheGeometry
from streamchat.cache.sink import SinkCache
from streamchat.config import CacheConfig
from streamchat.model.quantize import QuantizedLinear
from streamchat.ops.linear import CAN_COMPILE

LLAMA_LAYOUT = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `config.model_type` whose layers the compiled step knows."""

MAX_TOKENS = 18
"""A longer chunk is faster through torch, which reads the weights once for all its tokens, but has
to dequantize them (docs/log.md)."""

LANES = 16
"""Head sizes must be a multiple: keys are read in vectors of this many."""


def why_not_compiled(model: Any, geometry: CacheGeometry) -> str | None:
    """Why a model's decode steps are not compiled, in a line; None if they can be."""
    config = model.config
    if not CAN_COMPILE:
        return "NUMBA_DISABLE_JIT forbids compiling"
    if geometry.device.type != "cpu" or geometry.dtype != torch.float32:
        return "compiled decode steps need a CPU and float32"
    if config.model_type not in LLAMA_LAYOUT or getattr(config, "hidden_act", None) != "silu":
        return f"model family '{config.model_type}' has another layout"
    if not geometry.is_plain:
        return "its attention is of its own kind"
    if not geometry.is_uniform:
        return "its layers are not all alike"
    if geometry.rotary_dim != geometry.head_dim:
        return "it turns only a part of each head"
    if geometry.head_dim % LANES:
        return f"heads of {geometry.head_dim} elements cannot be read in vectors of {LANES}"
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if linear or not isinstance(model.get_output_embeddings(), QuantizedLinear):
        return "its weights are not quantized"
    layer = model.base_model.layers[0]
    if layer.self_attn.o_proj.bias is not None or layer.mlp.down_proj.bias is not None:
        return "its output or MLP layers have biases"
    return None


class CompiledStep:
    """The decode step of one model.

    The weights are stacked over the layers, so that one compiled function finds them all; the
    model's own modules then read the same memory.

    Args:
        model: A model that `why_not_compiled` has nothing against.
        geometry: Of its caches.
    """

    failure: str | None = None

    def __init__(self, model: Any, geometry: CacheGeometry) -> None:
        # Imported late: numba takes a while, and only a CPU needs it.
        from streamchat.ops.compiled.step import (
            Matrix,
            StepPlace,
            StepShape,
            StepWeights,
            decode_step,
        )

        self._decode_step, self._place = decode_step, StepPlace
        self._embedding = model.get_input_embeddings()
        layers = model.base_model.layers
        attention = [layer.self_attn for layer in layers]
        mlp = [layer.mlp for layer in layers]
        self._shape = StepShape(
            model.config.num_attention_heads,
            model.config.rms_norm_eps,
            attention[0].scaling,
            float(getattr(model.base_model.rotary_emb, "attention_scaling", 1.0)),
        )
        qkv = [(a.q_proj, a.k_proj, a.v_proj) for a in attention]
        head = model.get_output_embeddings()
        self._weights = StepWeights(
            attention_norm=_vectors([(layer.input_layernorm.weight,) for layer in layers]),
            qkv=Matrix(*_stack(qkv)),
            qkv_bias=_vectors([tuple(module.bias for module in three) for three in qkv]),
            query_norm=_vectors([(_norm_of(a, "q_norm"),) for a in attention]),
            key_norm=_vectors([(_norm_of(a, "k_norm"),) for a in attention]),
            output=Matrix(*_stack([(a.o_proj,) for a in attention])),
            mlp_norm=_vectors([(layer.post_attention_layernorm.weight,) for layer in layers]),
            gate_up=Matrix(*_stack([(m.gate_proj, m.up_proj) for m in mlp])),
            down=Matrix(*_stack([(m.down_proj,) for m in mlp])),
            final_norm=model.base_model.norm.weight.detach().numpy(),
            head=Matrix(head.codes.numpy(), _bits_of(head.scales)),
        )
        self._geometry = geometry

    @property
    def is_compiled(self) -> bool:
        """Whether the machine has compiled it before."""
        from streamchat.ops.compiled.step import is_kept

        return is_kept()

    def compile(self) -> None:
        """Feed a token to a cache of one: the first call on a machine compiles for seconds."""
        cache = SinkCache(CacheConfig(window_size=1), self._geometry)
        self(torch.zeros((1, 1), dtype=torch.int64), cache)

    def takes(self, cache: SinkCache, ids: Tensor) -> bool:
        """Whether it will feed these ids to this cache: few, in one row, to one of this model."""
        is_short = ids.shape[0] == 1 == cache.batch_size and ids.shape[1] <= MAX_TOKENS
        return is_short and cache.geometry is self._geometry

    def __call__(self, ids: Tensor, cache: SinkCache) -> Tensor:
        """Feed a token, or a few: all of them or none.

        Args:
            ids: Shape (1, num_tokens).
            cache: Gets the tokens appended.

        Returns:
            Logits, shape (1, num_tokens, vocab_size).
        """
        if ids.shape[1] == 1:
            return self._feed(ids[0, 0], cache)[None, None]
        with cache.all_or_nothing(ids.shape[1]):
            return torch.stack([self._feed(token, cache) for token in ids[0]])[None]

    def _feed(self, token: Tensor, cache: SinkCache) -> Tensor:
        layout, position = cache.layout, cache.num_seen
        with cache.step_outside():
            keys, values = cache.buffers
            logits = self._decode_step(
                self._weights,
                self._shape,
                self._place(
                    layout.slot(position),
                    layout.num_held(position + 1),
                    layout.num_sinks(position + 1),
                ),
                cache.next_tables().numpy(),
                self._embedding(token).numpy(),
                keys[:, 0].numpy(),
                values[:, 0].numpy(),
            )
        return torch.from_numpy(logits)


def _norm_of(attention: nn.Module, name: str) -> Tensor | None:
    norm = getattr(attention, name, None)
    return None if norm is None else norm.weight


def _vectors(layers: list[tuple[Tensor | None, ...]]) -> Any:
    """Vectors of each layer, side by side, shape (num_layers, width); width 0 if there are none."""
    if layers[0][0] is None:
        return np.empty((len(layers), 0), np.float32)
    rows = [torch.cat([part.detach() for part in parts if part is not None]) for parts in layers]
    return torch.stack(rows).numpy()


def _stack(layers: Sequence[tuple[QuantizedLinear, ...]]) -> tuple[Any, Any]:
    """Matrices of each layer, one above the other, in one array; the modules move into it."""
    arrays = []
    for name in ("codes", "scales"):
        parts = [getattr(module, name) for module in layers[0]]
        shape = (len(layers), sum(part.shape[0] for part in parts), parts[0].shape[1])
        # numpy asks for huge pages, torch does not.
        stack = torch.from_numpy(np.empty(shape, parts[0].numpy().dtype))
        for layer, modules in zip(stack, layers, strict=True):
            row = 0
            for module in modules:
                part = getattr(module, name)
                place = layer[row : row + part.shape[0]]
                setattr(module, name, place.copy_(part))
                row += part.shape[0]
        arrays.append(stack)
    return arrays[0].numpy(), _bits_of(arrays[1])


def _bits_of(scales: Tensor) -> Any:
    """float16 as it lies in memory: numba has no such type on a CPU."""
    return scales.view(torch.int16).numpy()
