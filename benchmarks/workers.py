"""One contender of `peers.py` in a process of its own, spoken to in lines of JSON.

    python benchmarks/workers.py KIND --threads 2 --source PATH [--option quantize=none]

Requests are `{"do": NAME, ...}`, one a line on standard input; each gets one line on standard
output. Between requests a worker waits for its next line and takes no processor time. What each
contender does with a request, and with a full cache, is written in its class. All compute logits
for the last token only, and choose the most likely token.
"""

import argparse
import contextlib
import inspect
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import SINKS, load_options, main_dtype, version_of

CHUNK = 512
"""Tokens of one forward pass at most, for all contenders."""


class Streamchat:
    """streamchat's own stream, as a program would use it. No source: the built-in model."""

    packages = ("torch", "transformers")

    def __init__(self, source: str, threads: int, quantize: str | None = None) -> None:
        import torch

        import streamchat

        torch.set_num_threads(threads)
        self._torch, self._package = torch, streamchat
        self.loaded = streamchat.load(source or None, device="cpu", **load_options(quantize))
        self.stream: Any = None

    @property
    def precision(self) -> tuple[str, str]:
        """Of the weights (what most of their bytes are stored in) and of the cache."""
        cache = self._package.SinkCache.for_model(self.loaded.model)
        return main_dtype(self.loaded.model), _short(cache.geometry.dtype)

    def open(self, size: int, ids: list[int]) -> None:
        config = self._package.CacheConfig(sink_size=SINKS, window_size=size - SINKS)
        self.stream = self._package.Stream(self.loaded, config, chunk_size=CHUNK)
        self.stream.feed(ids)

    def prefill(self, ids: list[int]) -> float:
        started = time.perf_counter()
        self.stream.feed(ids)
        return time.perf_counter() - started

    def decode(self, num_tokens: int) -> dict[str, Any]:
        seconds = []
        for _ in range(num_tokens):
            started = time.perf_counter()
            self.stream.feed([int(self.stream.logits.argmax())])
            seconds.append(time.perf_counter() - started)
        return {"seconds": seconds, "keys": self.stream.cache.num_held}

    def logits(self, ids: list[int]) -> Any:
        stream = self._package.Stream(self.loaded, chunk_size=CHUNK)
        stream.feed(ids)
        return stream.logits.float().numpy()


class _Transformers:
    """Stock transformers, its default attention, in float32."""

    packages = ("torch", "transformers")

    def __init__(self, source: str, threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self._torch, self._transformers = torch, transformers
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32
        ).eval()
        # transformers 5.24 calls `cache` what was `past_key_values`.
        known = inspect.signature(self.model.forward).parameters
        self._cache = "cache" if "cache" in known else "past_key_values"
        self.size = 0

    @property
    def precision(self) -> tuple[str, str]:
        return main_dtype(self.model), _short(self.model.dtype)

    def forward(self, ids: list[int], cache: Any) -> Any:
        """Logits after the last of `ids`, shape (vocab_size,)."""
        tokens = self._torch.tensor([ids])
        with self._torch.no_grad():
            out = self.model(
                tokens, **{self._cache: cache}, use_cache=cache is not None, logits_to_keep=1
            )
        return out.logits[0, -1]

    def feed(self, ids: list[int], cache: Any) -> Any:
        """`forward`, in chunks."""
        logits = None
        for start in range(0, len(ids), CHUNK):
            logits = self.forward(ids[start : start + CHUNK], cache)
        return logits

    def logits(self, ids: list[int]) -> Any:
        return self.forward(ids, None).float().numpy()


class _Dense(_Transformers):
    """A cache that evicts nothing, at the context length that is the others' cache size.

    Decode: `size` - 1 tokens are held, one is fed, and taken out again off the clock, so that each
    step sees `size` keys. Prefill: a chunk on top of `size` tokens, taken out again likewise.
    """

    def open(self, size: int, ids: list[int]) -> None:
        self.size = size
        self.for_decode = self.make_cache(size)
        self.for_prefill = self.make_cache(size + CHUNK)
        self.next = int(self.feed(ids[: size - 1], self.for_decode).argmax())
        self.feed(ids[:size], self.for_prefill)

    def make_cache(self, length: int) -> Any:
        raise NotImplementedError

    def prefill(self, ids: list[int]) -> float:
        started = time.perf_counter()
        self.feed(ids, self.for_prefill)
        seconds = time.perf_counter() - started
        self.for_prefill.crop(-len(ids))
        return seconds

    def decode(self, num_tokens: int) -> dict[str, Any]:
        seconds, keys = [], 0
        for _ in range(num_tokens):
            started = time.perf_counter()
            self.next = int(self.forward([self.next], self.for_decode).argmax())
            seconds.append(time.perf_counter() - started)
            keys = int(self.for_decode.get_seq_length())
            self.for_decode.crop(-1)
        return {"seconds": seconds, "keys": keys}


class Dynamic(_Dense):
    """`DynamicCache`, the default of `generate`: concatenates in each layer."""

    def make_cache(self, length: int) -> Any:  # noqa: ARG002 - grows as needed
        return self._transformers.DynamicCache(config=self.model.config)


class Static(_Dense):
    """`StaticCache`, not compiled: buffers of the full length, and a mask over them."""

    def make_cache(self, length: int) -> Any:
        return self._transformers.StaticCache(config=self.model.config, max_cache_len=length)


class Recompute(_Transformers):
    """Window with recomputation: a forward pass over the newest `size` tokens for each new one.

    It has no cache, so that it has no prefill of its own.
    """

    def open(self, size: int, ids: list[int]) -> None:
        self.size, self.ids = size, list(ids)

    def prefill(self, ids: list[int]) -> None:
        self.ids = [*self.ids, *ids][-self.size :]

    def decode(self, num_tokens: int) -> dict[str, Any]:
        seconds = []
        for _ in range(num_tokens):
            self.ids = self.ids[-self.size :]
            started = time.perf_counter()
            self.ids.append(int(self.forward(self.ids, None).argmax()))
            seconds.append(time.perf_counter() - started)
        return {"seconds": seconds, "keys": len(self.ids) - 1}


class AttentionSinks:
    """attention_sinks 0.4.0, under transformers 4.34.

    It evicts after the forward pass, so that its window does not count the token being fed: with
    `attention_sink_window_size` = W - 1 a query sees S + W keys, as ours does. The queries of a
    chunk see all keys that were held before it, which may be more. The language-model head is
    applied to the last token only, which this transformers cannot be asked for: it is called apart.
    """

    packages = ("torch", "transformers", "attention_sinks")

    def __init__(self, source: str, threads: int) -> None:
        import attention_sinks
        import torch
        from attention_sinks.attention_sink_kv_cache import AttentionSinkKVCache
        from transformers import LlamaConfig

        torch.set_num_threads(threads)
        self._torch, self._kv_cache = torch, AttentionSinkKVCache
        config = LlamaConfig.from_pretrained(source)
        # Newer files keep RoPE's base where this transformers does not look.
        fields = json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))
        rope = fields.get("rope_parameters") or fields
        if rope.get("rope_type", "default") != "default":
            raise SystemExit("attention_sinks: only plain RoPE can be compared")
        config.rope_theta = rope["rope_theta"]
        self.model = attention_sinks.LlamaForCausalLM.from_pretrained(
            source,
            config=config,
            torch_dtype=torch.float32,
            attention_sink_size=SINKS,
            attention_sink_window_size=1,
        ).eval()
        self.past: Any = None
        self.next = 0

    @property
    def precision(self) -> tuple[str, str]:
        return main_dtype(self.model), _short(self.model.dtype)

    def open(self, size: int, ids: list[int]) -> None:
        self.past = None
        self.model.model.attention_sink_kv_cache = self._kv_cache(
            attention_sink_size=SINKS, attention_sink_window_size=size - SINKS - 1
        )
        for start in range(0, len(ids), CHUNK):
            self.next = int(self._forward(ids[start : start + CHUNK]).argmax())

    def prefill(self, ids: list[int]) -> float:
        started = time.perf_counter()
        self._forward(ids)
        return time.perf_counter() - started

    def decode(self, num_tokens: int) -> dict[str, Any]:
        seconds, keys = [], 0
        for _ in range(num_tokens):
            keys = self.past[0][0].shape[2] + 1
            started = time.perf_counter()
            self.next = int(self._forward([self.next]).argmax())
            seconds.append(time.perf_counter() - started)
        return {"seconds": seconds, "keys": keys}

    def logits(self, ids: list[int]) -> Any:
        self.open(len(ids) + 2 * SINKS, ids[:-1])
        return self._forward(ids[-1:]).float().numpy()

    def _forward(self, ids: list[int]) -> Any:
        with self._torch.no_grad():
            out = self.model.model(
                self._torch.tensor([ids]), past_key_values=self.past, use_cache=True
            )
            self.past = out.past_key_values
            return self.model.lm_head(out.last_hidden_state[0, -1])


class LlamaCpp:
    """llama.cpp through llama-cpp-python's low-level calls, with its own defaults.

    `n_ctx` is the cache size, batches of 512; the cache is in float16 and flash attention is left
    to llama.cpp. Decode: `n_ctx` - 1 tokens are held, one is fed, and taken out again off the
    clock, so that each step sees `n_ctx` keys. Prefill: the chunk is fed as far as there is room;
    when there is none, the oldest half behind the first `SINKS` tokens is dropped and the rest
    moved down (`llama_memory_seq_rm`, `llama_memory_seq_add`), as its context shift does. That,
    too, is on the clock, and so is the turning of the keys, which the next batch does.
    `shift_seconds` is one step that begins with such a shift.
    """

    packages = ("llama_cpp_python",)

    def __init__(self, source: str, threads: int) -> None:
        import llama_cpp
        import numpy

        self._api, self._numpy, self._threads = llama_cpp, numpy, threads
        self._silence = llama_cpp.llama_log_callback(lambda *_args: None)
        llama_cpp.llama_log_set(self._silence, None)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(source.encode(), params)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {source}")
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._name = Path(source).stem.rsplit(".", 1)[-1]
        self._context: Any = None
        self.size = self.next = 0
        self._last: list[int] = []

    @property
    def precision(self) -> tuple[str, str]:
        return self._name, "float16"

    def open(self, size: int, ids: list[int]) -> None:
        if self._context is not None:
            self._api.llama_free(self._context)
        params = self._api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = size, CHUNK, CHUNK
        params.n_threads = params.n_threads_batch = self._threads
        self._context = self._api.llama_init_from_model(self._model, params)
        if not self._context or self._api.llama_n_ctx(self._context) != size:
            raise SystemExit(f"llama.cpp gives no context of {size} tokens; try a multiple of 256")
        self._memory = self._api.llama_get_memory(self._context)
        self.size, self._last = size, ids
        self._fill()

    def prefill(self, ids: list[int]) -> float:
        started = time.perf_counter()
        left = ids
        while left:
            room = self.size - 1 - self._num_held()
            if not room:
                self._shift()
                continue
            self._batch(left[:room])
            left = left[room:]
        seconds = time.perf_counter() - started
        self._last = ids
        self._fill()
        return seconds

    def decode(self, num_tokens: int) -> dict[str, Any]:
        seconds, keys = [], 0
        for _ in range(num_tokens):
            started = time.perf_counter()
            self._batch([self.next])
            self.next = int(self._logits().argmax())
            seconds.append(time.perf_counter() - started)
            keys = self._num_held()
            self._remove(self.size - 1, -1)
        started = time.perf_counter()
        self._shift()
        self._batch([self.next])
        self.next = int(self._logits().argmax())
        shift = time.perf_counter() - started
        self._fill()
        return {"seconds": seconds, "keys": keys, "shift_seconds": shift}

    def logits(self, ids: list[int]) -> Any:
        self.open(256, [])
        self._batch(ids)
        return self._logits().copy()

    def _fill(self) -> None:
        """Feed until one more token makes the context full."""
        left = self.size - 1 - self._num_held()
        ids = (self._last * (left // max(1, len(self._last)) + 1))[:left]
        for start in range(0, len(ids), CHUNK):
            self._batch(ids[start : start + CHUNK])
            self.next = int(self._logits().argmax())

    def _num_held(self) -> int:
        return self._api.llama_memory_seq_pos_max(self._memory, 0) + 1

    def _shift(self) -> None:
        held = self._num_held()
        discard = (held - SINKS) // 2
        self._remove(SINKS, SINKS + discard)
        self._api.llama_memory_seq_add(self._memory, 0, SINKS + discard, held, -discard)

    def _remove(self, start: int, stop: int) -> None:
        if not self._api.llama_memory_seq_rm(self._memory, 0, start, stop):
            raise SystemExit("llama.cpp cannot remove tokens from this memory")

    def _batch(self, ids: list[int]) -> None:
        tokens = (self._api.llama_token * len(ids))(*ids)
        batch = self._api.llama_batch_get_one(tokens, len(ids))
        if code := self._api.llama_decode(self._context, batch):
            raise SystemExit(f"llama.cpp: llama_decode gave {code}")

    def _logits(self) -> Any:
        pointer = self._api.llama_get_logits_ith(self._context, -1)
        return self._numpy.ctypeslib.as_array(pointer, shape=(self._vocab_size,))


KINDS: dict[str, Callable[..., Any]] = {
    "streamchat": Streamchat,
    "attention_sinks": AttentionSinks,
    "dynamic": Dynamic,
    "static": Static,
    "recompute": Recompute,
    "llama.cpp": LlamaCpp,
}


def answer(contender: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Do what a request asks for."""
    match request["do"]:
        case "hello":
            weights, cache = contender.precision
            versions = {name: version_of(name) for name in contender.packages}
            return {"weights": weights, "cache": cache, "versions": versions}
        case "probe":
            return {"nll": surprise(contender.logits(request["ids"]), request["next"])}
        case "open":
            contender.open(request["size"], request["ids"])
            return {}
        case "prefill":
            return {"seconds": contender.prefill(request["ids"])}
        case "decode":
            reply: dict[str, Any] = contender.decode(request["tokens"])
            return reply
    raise SystemExit(f"unknown request {request['do']!r}")


def surprise(logits: Any, token: int) -> float:
    """Negative log-likelihood of a token, in nats.

    Args:
        logits: NumPy array of shape (vocab_size,).
        token: Its id.
    """
    values = logits.tolist()
    peak = max(values)
    return peak + math.log(math.fsum(math.exp(value - peak) for value in values)) - values[token]


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    """Answer requests until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--source", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--option", action="append", default=[])
    args = parser.parse_args()
    options = dict(option.split("=", 1) for option in args.option)
    kind = KINDS[args.kind]
    # What libraries print must not come between the answers.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            try:
                contender = kind(args.source, args.threads, **options)
            except SystemExit as reason:
                print(json.dumps({"left_out": str(reason)}), file=answers)
                return
            print(json.dumps({"ready": True}), file=answers, flush=True)
            for line in sys.stdin:
                print(json.dumps(answer(contender, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
