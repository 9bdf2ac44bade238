"""Cache policies, each against an oracle of its own, and all cut, rewound and forked alike.

`window` is the sink cache without sinks, `dense` transformers' own cache, `recompute` a plain
forward pass over the newest tokens; H2O and SnapKV are held to slow streams over Python lists.
"""

from dataclasses import replace

import pytest
import torch
from conftest import BYTE_VOCAB_SIZE, byte_tokenizer, random_ids, tiny_model
from families import family_model
from oracles import SlowScored, assert_logits_equal
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GPT2Config,
    GPTBigCodeConfig,
    OPTConfig,
)

from streamchat import CacheConfig, ConfigError, StateError, UnsupportedModelError, load, prepare
from streamchat.cache import dense
from streamchat.cache.scored import check_geometry
from streamchat.cache.snapkv import Schedule
from streamchat.config import POLICIES
from streamchat.engine.stream import Stream
from streamchat.errors import StreamFullError
from streamchat.model.compat import logits_of
from streamchat.model.policies import forward, make_cache

SIZE, LENGTH = 12, 60
SCORED = ("h2o", "snapkv")
any_cut = pytest.mark.parametrize("size", [1, 25])
any_policy = pytest.mark.parametrize("policy", POLICIES)


def config_of(policy, size=SIZE):
    """A cache of this many tokens; dense ones have room for the whole stream."""
    if policy == "sink":
        return CacheConfig(sink_size=4, window_size=size - 4)
    return CacheConfig(
        sink_size=0, window_size=LENGTH + 20 if policy == "dense" else size, policy=policy
    )


def streamed(model, ids, cache, size):
    """Logits after every token, fed in chunks of `size`."""
    logits = [forward(model, chunk, cache, chunk.shape[1]) for chunk in ids.split(size, dim=1)]
    return torch.cat(logits, dim=1)


# Configuration


@any_policy
def test_all_policies_have_the_same_budget(policy):
    """Sinks and window together are the size of the cache, whatever the policy."""
    config = replace(CacheConfig(sink_size=4, window_size=12), policy=policy)
    assert config.cache_size == 16
    assert config.sink_size == (4 if policy == "sink" else 0)
    assert config.pin(8).cache_size == (20 if policy == "sink" else 16)


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match=r"policy must be one of sink.*got 'fifo'"):
        CacheConfig(policy="fifo")


# Oracles


@any_cut
@any_policy
def test_any_cut_of_the_stream_gives_the_same_numbers(policy, size):
    """All logits of a two-layer model, five caches into the stream."""
    model, ids = tiny_model(num_layers=2), random_ids(LENGTH)
    expected = streamed(model, ids, make_cache(model, config_of(policy)), 1)
    got = streamed(model, ids, make_cache(model, config_of(policy)), size)
    assert_logits_equal(got, expected)


@any_cut
def test_window_is_sink_without_sinks(size):
    model, ids = tiny_model(num_layers=2), random_ids(LENGTH)
    sink = CacheConfig(sink_size=0, window_size=SIZE)
    expected = streamed(model, ids, make_cache(model, sink), size)
    got = streamed(model, ids, make_cache(model, config_of("window")), size)
    assert torch.equal(got, expected)


@any_cut
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bloom"])
def test_dense_is_the_models_own_cache(name, size, monkeypatch):
    """The buffers grow several times on the way, native windows stay."""
    monkeypatch.setattr(dense, "FIRST_SLOTS", 8)
    model, ids = prepare(family_model(name)), random_ids(LENGTH)
    own = DynamicCache(config=model.config)
    expected = logits_of(model, ids, own, LENGTH)
    cache = make_cache(model, config_of("dense"))
    assert_logits_equal(streamed(model, ids, cache, size), expected, 3e-5)
    assert cache.num_held == LENGTH
    assert cache.num_evicted == 0


def plain_windows(model, ids, size):
    """Logits of a forward pass over the last `size` ids up to each."""
    rows = [ids[:, max(0, end - size) : end] for end in range(1, ids.shape[1] + 1)]
    with torch.no_grad():
        return torch.stack([model(row, use_cache=False).logits[:, -1] for row in rows], dim=1)


@any_cut
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "mpt"])
def test_recompute_is_a_plain_pass_over_the_newest(name, size):
    model, ids = prepare(family_model(name)), random_ids(LENGTH)
    cache = make_cache(model, config_of("recompute"))
    got = streamed(model, ids, cache, size)
    assert_logits_equal(got, plain_windows(model, ids, SIZE), 3e-5)
    assert cache.num_held == SIZE


LEARNED = {
    "gpt2": GPT2Config(n_embd=32, n_head=4, n_layer=2, n_positions=32),
    "opt": OPTConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_hidden_layers=2,
        ffn_dim=64,
        word_embed_proj_dim=32,
        max_position_embeddings=32,
    ),
    "gpt_bigcode": GPTBigCodeConfig(n_embd=32, n_head=4, n_layer=2, n_positions=32),
}


@pytest.fixture(scope="module", params=LEARNED)
def learned_folder(request, tmp_path_factory):
    """A model with learned absolute positions, 32 of them, and its tokenizer."""
    config = LEARNED[request.param]
    config.vocab_size, config.bos_token_id, config.eos_token_id = BYTE_VOCAB_SIZE, 1, 2
    config.initializer_range = config.init_std = 0.3
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("learned") / request.param
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("size", [1, 7, 25])
def test_learned_positions_are_computed_anew(learned_folder, size):
    """Far past the positions that the model has."""
    config = CacheConfig(sink_size=0, window_size=20, policy="recompute")
    loaded = load(str(learned_folder), cache_config=config, quantize="none")
    ids = random_ids(200)
    stream = Stream(loaded, config, chunk_size=size)
    got = stream.score(ids[0].tolist())
    logits = plain_windows(loaded.model, ids, 20)[0].log_softmax(dim=-1)
    expected = -logits[:-1].gather(1, ids[0, 1:, None])[:, 0]
    assert got[0] is None
    assert torch.tensor(got[1:]) == pytest.approx(expected, abs=1e-4)


def test_learned_positions_from_the_command_line(learned_folder, command):
    """Refused for `sink`, and above the positions there are; streamed with `recompute`."""
    refused = command("pipe", "--mode", "score", "-m", learned_folder, stdin=b"y\nhello\n")
    assert (refused.code, refused.out) == (3, "")
    assert "positions are learned and absolute" in refused.err
    assert "is 32)" in refused.err
    assert "--policy recompute" in refused.err
    options = ("--mode", "score", "-m", learned_folder, "--policy", "recompute", "--window")
    above = command("pipe", *options, "40", stdin=b"hello\n")
    assert above.code == 3
    assert "32 tokens the model was trained for" in above.err
    scored = command("pipe", *options, "24", stdin=b"one line\n" * 30)
    assert scored.code == 0, scored.err
    assert scored.out.count("one line") == 30
    shown = command("info", learned_folder, "--policy", "recompute", "--window", "24")
    assert "computed anew at each step" in shown.out


MATRIX = (
    "llama",
    "cohere",  # pairs
    "gpt_neox",  # a part of each head
    "smollm3",  # layers without angles
    "gemma2",  # soft-capping, native windows
    "gpt_oss",  # learned sinks
    "ministral3",  # scaled queries
    "phi3",  # longrope
)
"""One family of each kind of attention."""


def scored_cache(model, policy, size):
    """A cache of a scored policy, or None where some layers have a shorter native window."""
    config = config_of(policy, size)
    try:
        check_geometry(config, model.streamchat_binding.geometry)
    except UnsupportedModelError:
        return None
    return make_cache(model, config)


@pytest.mark.parametrize("policy", SCORED)
@pytest.mark.parametrize("name", MATRIX)
def test_scored_policies_are_the_slow_lists(name, policy):
    """Two layers of each family that the policies fit, in one chunk and token by token."""
    model, ids = prepare(family_model(name)), random_ids(40)
    # Within the tiny native windows where a family has them.
    size = SIZE if scored_cache(model, policy, SIZE) is not None else 8
    slow = SlowScored(model, size, policy)
    expected = torch.cat([forward(model, token, slow) for token in ids.split(1, dim=1)], dim=1)
    for cut in (1, 40):
        got = streamed(model, ids, scored_cache(model, policy, size), cut)
        assert_logits_equal(got, expected, 3e-5)


@pytest.mark.parametrize("policy", SCORED)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 40])
def test_scored_policies_at_odd_sizes(policy, size):
    """Down to a cache of one token, and with more voters than one block's."""
    model, ids = tiny_model(num_layers=2), random_ids(50)
    slow = SlowScored(model, size, policy)
    expected = torch.cat([forward(model, token, slow) for token in ids.split(1, dim=1)], dim=1)
    for cut in (1, 50):
        cache = make_cache(model, config_of(policy, size))
        assert_logits_equal(streamed(model, ids, cache, cut), expected, 3e-5)
        assert cache.num_held + cache.num_evicted == 50


@pytest.mark.parametrize("policy", SCORED)
def test_scored_policies_with_softmax_off_by_one(policy):
    """The votes, too, are by the softmax that the model was trained with."""
    model, ids = tiny_model(num_layers=2, streamchat_softmax="off_by_one"), random_ids(40)
    slow = SlowScored(model, SIZE, policy)
    expected = torch.cat([forward(model, token, slow) for token in ids.split(1, dim=1)], dim=1)
    for cut in (1, 40):
        got = streamed(model, ids, make_cache(model, config_of(policy)), cut)
        assert_logits_equal(got, expected, 3e-5)


@pytest.mark.parametrize("policy", SCORED)
def test_scored_policies_do_not_fit_every_model(policy):
    for name, reason in (("bloom", "ALiBi"), ("gemma2", "native window of 8")):
        model = prepare(family_model(name))
        with pytest.raises(UnsupportedModelError, match=f"--policy {policy} .*{reason}"):
            make_cache(model, config_of(policy))


def test_snapkv_holds_what_its_schedule_says():
    """Never more than its size, never fewer than what a compression keeps, one more each step."""
    for size in range(1, 70):
        schedule = Schedule(size)
        held = [schedule.num_held(seen) for seen in range(6 * size)]
        assert held[: size + 1] == list(range(min(size + 1, 6 * size)))
        for before, after in zip(held[size:], held[size + 1 :], strict=False):
            assert after == (schedule.num_kept + 1 if before == size else before + 1)
        assert 0 <= schedule.num_voters <= min(32, schedule.num_kept)


# What all policies share


@any_policy
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_an_interrupted_step_changes_nothing(policy, num_tokens):
    """An exception in the second layer of a step takes the first layer's back."""
    model, ids = tiny_model(num_layers=2), random_ids(LENGTH)
    cache, other = (make_cache(model, config_of(policy)) for _ in range(2))
    for each in (cache, other):
        forward(model, ids[:, :30], each)
    broken = model.base_model.layers[1].mlp.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        forward(model, ids[:, 30 : 30 + num_tokens], cache)
    broken.remove()
    got = streamed(model, ids[:, 40:], cache, 1)
    assert torch.equal(got, streamed(model, ids[:, 40:], other, 1))


def interrupt(*_args):
    raise KeyboardInterrupt


@any_policy
def test_rewound_tokens_leave_no_trace(policy):
    """Where they were fed one at a time, even over an eviction or a compression."""
    model, ids = tiny_model(num_layers=2), random_ids(LENGTH)
    for start in (5, 11, 12, 13, 24, 40):
        cache, other = (make_cache(model, config_of(policy)) for _ in range(2))
        cache.set_undo_depth(6)
        for each in (cache, other):
            forward(model, ids[:, :start], each)
        streamed(model, ids[:, start : start + 6], cache, 1)
        cache.rewind(6)
        assert cache.num_seen == start
        got = streamed(model, ids[:, 45:], cache, 1)
        assert_logits_equal(got, streamed(model, ids[:, 45:], other, 1), 1e-6)
    with pytest.raises(StateError, match="can take back"):
        cache.rewind(7)


@any_policy
@pytest.mark.parametrize("length", [3, SIZE, 29])
def test_a_restored_stream_goes_on_as_it_was(policy, length):
    """Bit for bit, in another cache, before and after the first eviction."""
    model, ids = tiny_model(num_layers=2), random_ids(LENGTH)
    cache = make_cache(model, config_of(policy))
    forward(model, ids[:, :length], cache)
    snapshot, fork = cache.snapshot(), cache.fork()
    expected = streamed(model, ids[:, length:], fork, 1)
    other = make_cache(model, config_of(policy))
    forward(model, random_ids(50, seed=7), other)
    other.restore(snapshot)
    assert other.num_seen == length
    assert torch.equal(streamed(model, ids[:, length:], other, 1), expected)
    assert torch.equal(streamed(model, ids[:, length:], cache, 1), expected) or (
        policy == "recompute"  # whose fork feeds again what the stream's own cache still holds
    )
    wrong = make_cache(model, replace(config_of(policy), window_size=SIZE + 1))
    with pytest.raises(StateError, match="other sizes"):
        wrong.restore(snapshot)


@pytest.mark.parametrize("policy", SCORED)
def test_rows_can_be_chosen(policy):
    """For beam search: what was row 1 goes on as row 0, and what it holds is its own."""
    model = tiny_model(num_layers=2)
    ids = torch.cat((random_ids(LENGTH), random_ids(LENGTH, seed=7)))
    cache = make_cache(model, config_of(policy), batch_size=2)
    forward(model, ids[:, :40], cache)
    other = cache.fork()
    other.reorder_cache(torch.tensor([1, 0]))
    expected = streamed(model, ids[:, 40:], cache, 1)
    assert_logits_equal(streamed(model, ids[:, 40:].flip(0), other, 1), expected.flip(0))


@pytest.mark.parametrize("policy", SCORED)
def test_a_model_that_is_not_prepared_is_refused(policy):
    """Nobody would rotate the keys."""
    cache = make_cache(tiny_model(), config_of(policy))
    plain = AutoModelForCausalLM.from_config(tiny_model().config)
    with pytest.raises(StateError, match="not prepared"):
        logits_of(plain, random_ids(2), cache)


def test_a_full_dense_cache_says_so_and_stays_as_it_was():
    model, ids = tiny_model(), random_ids(30)
    cache = make_cache(model, CacheConfig(sink_size=0, window_size=20, policy="dense"))
    forward(model, ids[:, :18], cache)
    with pytest.raises(StreamFullError, match=r"20 at most, and 23 were fed; --policy sink"):
        forward(model, ids[:, 18:23], cache)
    expected = logits_of(model, ids[:, :20], DynamicCache(config=model.config))
    assert_logits_equal(forward(model, ids[:, 18:20], cache), expected)


@any_policy
def test_rows_of_a_batch_are_streams_of_their_own(policy):
    model, ids = tiny_model(num_layers=2), random_ids(LENGTH, batch_size=2)
    cache = make_cache(model, config_of(policy), batch_size=2)
    both = streamed(model, ids, cache, 7)
    for row in range(2):
        alone = streamed(model, ids[row : row + 1], make_cache(model, config_of(policy)), 7)
        assert_logits_equal(both[row], alone[0])


@any_policy
def test_the_command_line_takes_every_policy(policy, tiny_folder, command):
    """In a chat and in a pipe, ten caches long; what is held is said at the start."""
    options = ("-m", tiny_folder, "--policy", policy, "--window", "60", "--temperature", "0")
    text = b"a line of some length\n" * 40
    scored = command("pipe", "--mode", "score", *options[:-2], stdin=text)
    assert scored.code == 0, scored.err
    assert len(scored.out.splitlines()) == 40
    said = {
        "sink": "pinned",
        "window": "64 newest, no sinks",
        "dense": "all tokens, 4,096 at most",  # the trained length
        "recompute": "computed anew",
        "h2o": "heavy hitters",
        "snapkv": "the newest attended to",
    }[policy]
    assert said in scored.err
    chat = command("chat", *options, "--max-new", "20", stdin=b"hello\nyou\n")
    assert chat.code == 0, chat.err
    assert said in chat.err
