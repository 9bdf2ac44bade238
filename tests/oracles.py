"""What the sink cache is held against: three independent answers to "which logits?".

A, `one_layer_oracle`: a stock forward pass over the retained ids. True for one layer only: upper
layers remember text that has been evicted.
B, `SlowStream`: any number of layers, token by token, keys kept un-rotated in a Python list and
rotated afresh at every step, in float64. Shares no code with streamchat.
C, `greedy_oracle`: transformers' own `generate` with its own cache. True until the first eviction.
"""

import math
import sys

import torch
from torch.nn import functional as F

from streamchat.cache.face import StepCache
from streamchat.model.families import LOCAL, body_of

RELATIVE_TOLERANCE = 1e-5
"""Largest float32 error of a logit, as a share of the largest logit (about 7 here).

The tiny models' weights are drawn with a deviation of 0.3, so that rounding is amplified along with
everything else: their stock float32 forward is itself off by 2e-6 of the largest logit. Sinks that
are not re-placed, or a slot that is one off, move a logit by half a percent at the very least and
mostly by more than the largest logit.
"""


def assert_logits_equal(got, expected, relative=RELATIVE_TOLERANCE):
    assert got.shape == expected.shape
    tolerance = relative * float(expected.abs().max())
    error = float((got.double() - expected.double()).abs().max())
    # `not <=`, so that NaN fails too.
    assert error <= tolerance, f"logits off by {error:.3e}, allowed {tolerance:.3e}"


def retained_ids(ids, sink_size, window_size):
    """The ids that a cache holds after `ids`: the first S and, of the rest, the last W."""
    return ids[:sink_size] + ids[sink_size:][-window_size:]


def one_layer_oracle(model, ids, sink_size, window_size):
    """Oracle A: last logits, shape (vocab_size,), of a stock pass over a list of ids."""
    retained = torch.tensor([retained_ids(ids, sink_size, window_size)])
    with torch.no_grad():
        return model(retained, use_cache=False).logits[0, -1]


def greedy_oracle(model, ids, num_new):
    """Oracle C: the `num_new` ids that stock `generate` appends greedily to each row."""
    out = model.generate(ids, max_new_tokens=num_new, do_sample=False, eos_token_id=None)
    return out[:, ids.shape[1] :]


def rotated(x, position, inv_freq):
    """A float64 vector turned to `position`: its two halves are real and imaginary parts."""
    real, imaginary = x.double().chunk(2, dim=-1)
    turned = torch.complex(real, imaginary) * torch.exp(1j * position * inv_freq)
    return torch.cat((turned.real, turned.imag), dim=-1)


def attend_afresh(query, held, inv_freq):
    """Attention of the newest token over a list of held (key, value), all un-rotated.

    Args:
        query: Shape (num_heads, head_dim).
        held: Pairs of shape (num_kv_heads, head_dim) each, oldest first, the query's own last.
        inv_freq: Shape (head_dim // 2,).

    Returns:
        Shape (num_heads, head_dim), float64.
    """
    keys = torch.stack([rotated(key, index, inv_freq) for index, (key, _) in enumerate(held)])
    values = torch.stack([value.double() for _, value in held])
    query = rotated(query, len(held) - 1, inv_freq)
    group_size = query.shape[0] // keys.shape[1]
    out = []
    for head, vector in enumerate(query):
        kv_head = head // group_size
        weights = torch.softmax(keys[:, kv_head] @ vector / vector.shape[0] ** 0.5, dim=0)
        out.append(weights @ values[:, kv_head])
    return torch.stack(out)


def attention_oracle(queries, keys, values, sink_size, window_size, inv_freq):
    """Oracle B without a model: one row of one layer, shapes (heads, length, head_dim)."""
    out, held = [], []
    for index in range(keys.shape[1]):
        held.append((keys[:, index], values[:, index]))
        if len(held) > sink_size + window_size:
            del held[sink_size]
        out.append(attend_afresh(queries[:, index], held, inv_freq))
    return torch.stack(out, dim=1)


class SlowStream:
    """Oracle B: a Llama, Mistral, Qwen2 or Qwen3 forward pass over a list of held tokens.

    Keys and values are computed once, from what the token saw at the time. Positions are the
    indices in the list, so a query never sees a distance of S + W.
    """

    def __init__(self, model, sink_size, window_size):
        config = model.config
        assert config.rope_parameters["rope_type"] == "default"
        self.weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
        self.eps = config.rms_norm_eps
        self.head_dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        theta, size = config.rope_parameters["rope_theta"], self.head_dim
        self.inv_freq = torch.tensor([theta ** (-i / size) for i in range(0, size, 2)]).double()
        self.sink_size, self.window_size = sink_size, window_size
        self.held = [[] for _ in range(config.num_hidden_layers)]

    @torch.no_grad()
    def feed(self, token):
        """Logits of the next token, shape (vocab_size,), float64."""
        x = self.weights["model.embed_tokens.weight"][token]
        for index, held in enumerate(self.held):
            layer = f"model.layers.{index}"
            x = x + self._attention(f"{layer}.self_attn", self._norm(f"{layer}.input", x), held)
            x = x + self._mlp(f"{layer}.mlp", self._norm(f"{layer}.post_attention", x))
        return self._linear("lm_head", self._rms(x, self.weights["model.norm.weight"]))

    def feed_all(self, ids):
        """Logits after each id, shape (length, vocab_size)."""
        return torch.stack([self.feed(token) for token in ids])

    def _attention(self, name, x, held):
        query, key, value = (
            self._linear(f"{name}.{which}_proj", x).view(-1, self.head_dim) for which in "qkv"
        )
        if f"{name}.q_norm.weight" in self.weights:
            query = self._rms(query, self.weights[f"{name}.q_norm.weight"])
            key = self._rms(key, self.weights[f"{name}.k_norm.weight"])
        held.append((key, value))
        if len(held) > self.sink_size + self.window_size:
            del held[self.sink_size]
        out = attend_afresh(query, held, self.inv_freq)
        return self._linear(f"{name}.o_proj", out.flatten())

    def _mlp(self, name, x):
        gate = F.silu(self._linear(f"{name}.gate_proj", x))
        return self._linear(f"{name}.down_proj", gate * self._linear(f"{name}.up_proj", x))

    def _linear(self, name, x):
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, name, x):
        return self._rms(x, self.weights[f"{name}_layernorm.weight"])

    def _rms(self, x, weight):
        return x / (x.square().mean(dim=-1, keepdim=True) + self.eps).sqrt() * weight


class SlowCache(StepCache):
    """Oracle B for any family: tokens are fed one by one, and everything is computed afresh.

    Keys and values are kept as they came, not rotated. For each query the held ones are numbered
    0, 1, 2, …, rotated or biased by the model's own functions, and attended to in float64.
    """

    def __init__(self, model, sink_size, window_size):
        geometry = model.streamchat_binding.geometry
        self.model, self.size, self.sink_size = model, sink_size + window_size, sink_size
        self.geometry = geometry
        self.has_alibi = getattr(model.config, "alibi", model.config.model_type in ("bloom", "mpt"))
        self.held = [[] for _ in range(geometry.num_layers)]
        empty = torch.empty(geometry.num_layers, 0)
        super().__init__(empty, empty)

    def begin(self, num_tokens):
        assert num_tokens == 1

    def commit(self):
        pass

    def reset(self):
        raise NotImplementedError

    def get_seq_length(self, layer_idx=0):
        return 0

    def attend(self, layer_idx, query, key, value, scaling=None, sink_logit=None):
        geometry = self.geometry
        is_local = layer_idx in geometry.local_layers
        size, sink_size = self.size, self.sink_size
        if is_local and geometry.native_window < size:
            size, sink_size = geometry.native_window, 0
        held = self.held[layer_idx]
        held.append((key, value))
        if len(held) > size:
            del held[sink_size]
        keys = torch.cat([key for key, _ in held], dim=2)
        values = torch.cat([value for _, value in held], dim=2).double()
        newest = len(held) - 1
        query = query * self.query_scale(layer_idx, newest)
        if not self.has_alibi and layer_idx not in geometry.unrotated_layers:
            query = self.rotated(query, newest, is_local)
            keys = torch.cat(
                [self.rotated(keys[:, :, i : i + 1], i, is_local) for i in range(len(held))], 2
            )
        group_size = query.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(group_size, dim=1) for x in (keys.double(), values))
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = query.double() @ keys.transpose(-1, -2) * scaling
        if geometry.softcap is not None:
            scores = geometry.softcap * torch.tanh(scores / geometry.softcap)
        if self.has_alibi:
            scores = scores + self.biases(len(held))
        weights = scores.exp()
        total = weights.sum(-1, keepdim=True)
        if sink_logit is not None:
            total = total + sink_logit.double().exp()[None, :, None, None]
        if geometry.softmax == "off_by_one":
            total = total + 1
        return (weights / total @ values).to(value.dtype)

    def query_scale(self, layer_idx, position):
        """Factor on a layer's queries: Ministral 3's, and Llama 4's where it does not rotate."""
        config = self.model.config
        grows_unrotated = getattr(config, "attn_temperature_tuning", False)
        if config.model_type == "ministral3":
            rope = config.rope_parameters
            steps = position // rope["original_max_position_embeddings"]
            return 1 + rope["llama_4_scaling_beta"] * math.log(1 + steps)
        if grows_unrotated and not config.no_rope_layers[layer_idx]:
            steps = math.floor((position + 1) / config.floor_scale)
            return 1 + config.attn_scale * math.log(1 + steps)
        return 1

    def biases(self, num_keys):
        """What the model's own attention adds to scaled scores, shape (num_heads, 1, num_keys)."""
        config = self.model.config
        functions = sys.modules[type(self.model).__module__]
        if config.model_type == "mpt":
            return functions.build_mpt_alibi_tensor(config.n_heads, num_keys).double()
        mask, num_heads = torch.ones(1, num_keys, dtype=torch.long), config.num_attention_heads
        biases = functions.build_alibi_tensor(mask, num_heads, torch.float64)
        is_scaled = config.model_type == "falcon"
        return biases / config.head_dim**0.5 if is_scaled else biases

    def rotated(self, x, position, is_local):
        """Turned to a position as the model's own attention does it, but for a constant factor."""
        model = self.model
        functions = sys.modules[type(model).__module__]
        rotary = getattr(body_of(model), "rotary_emb", None)
        if hasattr(
            functions, "create_sinusoidal_positions"
        ):  # GPT-J, CodeGen: (batch, tokens, heads), sines first
            table = functions.create_sinusoidal_positions(position + 1, model.config.rotary_dim)
            sin, cos = table[position][None, None].chunk(2, dim=-1)
            part = x[..., : model.config.rotary_dim].transpose(1, 2)
            turned = functions.apply_rotary_pos_emb(part, sin, cos).transpose(1, 2)
        elif hasattr(functions, "apply_rotary_emb"):  # Llama 4: (batch, tokens, heads), complex
            turn = rotary(x, torch.tensor([[position]])) / rotary.attention_scaling
            turned, _ = functions.apply_rotary_emb(x.transpose(1, 2), x.transpose(1, 2), turn)
            turned = turned.transpose(1, 2)
        else:
            # The largest position decides on longrope's table: the cache is one of `size` tokens.
            positions = torch.tensor([[position, self.size - 1]])
            kind = (
                [LOCAL if is_local else "full_attention"] if hasattr(rotary, "layer_types") else []
            )
            cos, sin = (table[:, :1] for table in rotary(x, positions, *kind))
            name = "_".join([*kind, "attention_scaling"])
            factor = getattr(rotary, name, 1.0)  # the model has applied it
            rotary_dim = 2 * len(self.geometry.inv_freq)
            part = x[..., :rotary_dim]
            turned, _ = functions.apply_rotary_pos_emb(part, part, cos / factor, sin / factor)
        return torch.cat((turned, x[..., turned.shape[-1] :]), dim=-1)


class SlowScored(SlowCache):
    """H2O or SnapKV over Python lists: for each head, (key, value, score) of what it holds."""

    def __init__(self, model, size, policy):
        super().__init__(model, 0, size)
        self.policy = policy
        self.held = [[[] for _ in range(self.geometry.num_kv_heads)] for _ in self.held]

    def attend(self, layer_idx, query, key, value, scaling=None, sink_logit=None):
        geometry = self.geometry
        group_size = query.shape[1] // key.shape[1]
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = []
        for head, held in enumerate(self.held[layer_idx]):
            self.make_room(held)
            held.append([key[:, head : head + 1], value[0, head, 0].double(), 0.0])
            newest = len(held) - 1
            total = torch.zeros(len(held)).double()
            for index in range(head * group_size, (head + 1) * group_size):
                one = query[:, index : index + 1]
                one = one * self.query_scale(layer_idx, newest)
                keys = [entry[0] for entry in held]
                if layer_idx not in geometry.unrotated_layers:
                    one = self.rotated(one, newest, False)
                    keys = [self.rotated(key, i, False) for i, key in enumerate(keys)]
                scores = torch.stack([(k.double() * one.double()).sum() for k in keys]) * scaling
                if geometry.softcap is not None:
                    scores = geometry.softcap * torch.tanh(scores / geometry.softcap)
                weights = scores.exp()
                extra = float(geometry.softmax == "off_by_one")
                extra = extra if sink_logit is None else sink_logit[index].double().exp()
                weights = weights / (weights.sum() + extra)
                total += weights
                out.append(sum(w * entry[1] for w, entry in zip(weights, held, strict=True)))
            if self.policy == "h2o" or len(held) > self.size - self.num_voters:
                for entry, drawn in zip(held, total, strict=True):
                    entry[2] += float(drawn)
        return torch.stack(out)[None, :, None].to(value.dtype)

    @property
    def num_voters(self):
        quarter = max(1, self.size // 4)
        return max(0, min(32, quarter, self.size - quarter))

    def make_room(self, held):
        if len(held) < self.size:
            return
        if self.policy == "h2o":
            candidates = range(self.size - max(1, self.size // 2) + 1)
            del held[min(candidates, key=lambda index: held[index][2])]
            return
        num_others = self.size - self.num_voters
        votes = [entry[2] for entry in held[:num_others]]
        pooled = [sum(votes[max(0, i - 2) : i + 3]) for i in range(num_others)]
        ranked = sorted(range(num_others), key=lambda index: -pooled[index])
        kept = self.size - max(1, self.size // 4) - self.num_voters
        held[:num_others] = [held[index] for index in sorted(ranked[:kept])]
        for entry in held:
            entry[2] = 0.0
