"""One model in several processes, started by torchrun: as exact as in one.

Oracles: the same model in one process; for the orders, a second cache that is fed by itself. Two
processes on the CPU, over gloo.
"""

import gc
import itertools
import json
import os
import pickle
import random
import re
import signal
import subprocess
import sys
from collections import deque
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import byte_tokenizer, random_ids, tiny_model
from families import ROWS, family_config, family_model
from transformers import LlamaConfig, LlamaForCausalLM
from walk import CONFIG, POLICIES, walk

from streamchat import (
    CacheConfig,
    ConfigError,
    SinkCache,
    StateError,
    Stream,
    StreamchatError,
    UnsupportedModelError,
    load,
)
from streamchat.cli.session_options import open_journal
from streamchat.errors import StreamFullError, UsageError
from streamchat.model import ranks as ranks_module
from streamchat.model import sharded
from streamchat.model.decode import choose_decode_step, why_not_captured, why_slow
from streamchat.model.fit import cache_bytes, check_memory, weight_bytes
from streamchat.model.follow import Counterparts
from streamchat.model.launch import is_one_of_several
from streamchat.model.mirrored import lead, mirrored
from streamchat.model.plan import plan
from streamchat.model.policies import make_cache
from streamchat.model.prepare import forward
from streamchat.model.ranks import Ranks, join
from streamchat.model.sharded import check_plan

pytestmark = pytest.mark.slow  # many starts of the real program: minutes

SHARED = ("llama", "mixtral", "olmo2", "gpt_neox", "qwen3")
"""Plain, with experts, with heads gathered for a norm, with fused projections, with norms."""

SHARE = Path(__file__).with_name("share.py")

LINES = "".join(f"Line {number} of a log that does not end.\n" for number in range(12))


# Several processes


def torchrun(*args, **options):
    """Start two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return subprocess.Popen(
        [*command, "--nproc-per-node", "2", *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=options.pop("stdout", subprocess.PIPE),
        stderr=subprocess.PIPE,
        env=environment,
        **options,
    )


def streamchat(*args, **options):
    return torchrun("-m", "streamchat", *args, **options)


def ended(run, stdin=b""):
    """Wait for both; stdout, what the program itself wrote on stderr, and exit codes by rank."""
    out, err = run.communicate(stdin, timeout=300)
    text = err.decode()
    codes = re.findall(r"rank\s+: (\d) .*\n\s+exitcode\s+: (-?\d+)", text)
    own = [line for line in text.splitlines() if line.startswith(("streamchat: ", "process "))]
    return out, own, {int(rank): int(code) for rank, code in codes}


def save(model, path):
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of two layers, two key/value heads, and an even vocabulary."""
    path = tmp_path_factory.mktemp("shared") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    save(LlamaForCausalLM(config), path)
    return path


@pytest.fixture(scope="module")
def families_folder(tmp_path_factory):
    """Tiny models of several families."""
    path = tmp_path_factory.mktemp("families")
    for name in (*SHARED, "bloom"):
        save(family_model(name, vocab_size=260), path / name)
    return path


@pytest.fixture(scope="module")
def runs(folder, families_folder, tmp_path_factory):
    """All that takes several processes, started at once."""
    results = tmp_path_factory.mktemp("results") / "seen.json"
    text = tmp_path_factory.mktemp("text") / "lines.txt"
    text.write_text(LINES)
    reply = ("pipe", "--mode", "reply", "--prompt", "Answer.", "--window", "60", "--max-new", "25")
    score = ("pipe", "--mode", "score", "--window", "60", "-m", folder)
    full = Path("/dev/full")
    with full.open("wb") if full.exists() else nullcontext(subprocess.DEVNULL) as nowhere:
        started = {
            "families": torchrun(SHARE, families_folder, results),
            "reply": streamchat(*reply, "-m", folder, text),
            "score": streamchat(*score),
            "full": streamchat(*score, text, stdout=nowhere),
        }
    yield {**started, "results": results}
    for run in started.values():
        run.kill()
        run.communicate()


def in_one_process(command, folder, *args):
    done = command(*args, "-m", folder, "--quantize", "none", stdin=LINES.encode())
    assert done.code == 0
    return done.out


def assert_same(folder, seen):
    """Scores and greedy ids, past evictions."""
    for name, got in seen.items():
        family = "llama" if name in POLICIES else name
        loaded = load(str(folder / family), device="cpu", quantize="none")
        expected = walk(loaded, POLICIES.get(name, CONFIG))
        assert got.pop("scores") == pytest.approx(expected.pop("scores"), abs=1e-4)
        assert got == expected


def test_families_give_the_same_numbers(runs, families_folder):
    """Python's interface, one model after the other, and each policy; one is refused."""
    ended(runs["families"])
    seen = json.loads(runs["results"].read_text(encoding="utf-8"))
    assert "no tensor-parallel plan for the family 'bloom'" in seen.pop("bloom")
    assert set(seen) == {*SHARED, *POLICIES}
    assert_same(families_folder, seen)


@pytest.mark.slow
def test_every_family_gives_the_same_numbers_or_is_refused(tmp_path):
    """A plan may be missing, or fail by itself; none makes a model say something else."""
    saved = tmp_path / "models"
    for name in ROWS:
        with suppress(pytest.skip.Exception):
            save(family_model(name, vocab_size=260), saved / name.replace(" ", "-"))
    ended(torchrun(SHARE, saved, tmp_path / "seen.json"))
    seen = json.loads((tmp_path / "seen.json").read_text(encoding="utf-8"))
    assert len(seen) == len(list(saved.iterdir())) + len(POLICIES)
    refused = {name: text for name, text in seen.items() if isinstance(text, str)}
    assert all("no tensor-parallel plan" in refused[name] or name == "cohere" for name in refused)
    assert len(seen) - len(refused) >= 30
    assert_same(saved, {name: got for name, got in seen.items() if name not in refused})


def test_replies_are_the_same(runs, folder, command):
    """Through the real command, greedily, with turns leaving the memory."""
    out, own, codes = ended(runs["reply"])
    assert not codes
    shared = ("pipe", "--mode", "reply", "--prompt", "Answer.", "--window", "60", "--max-new", "25")
    assert out.decode() == in_one_process(command, folder, *shared)
    assert any("left the model's memory" in line for line in own)
    assert any("shared by 2 processes" in line for line in own)


def test_scores_are_the_same_until_ctrl_c(runs, folder, command):
    """A live stream, interrupted while it waits: the first process leaves as ever, and both go."""
    run = runs["score"]
    run.stdin.write(LINES.encode())
    run.stdin.flush()
    lines = [run.stdout.readline().decode() for _ in range(12)]
    expected = in_one_process(
        command, folder, "pipe", "--mode", "score", "--window", "60"
    ).splitlines()
    for line, other in zip(lines, expected, strict=True):
        (nats, _, text), (other_nats, _, other_text) = (
            x.rstrip("\n").split("\t") for x in (line, other)
        )
        assert text == other_text
        assert float(nats) == pytest.approx(float(other_nats), abs=1.1e-3)  # of three digits
    processes = psutil.Process(run.pid).children()
    [first] = [process for process in processes if process.environ().get("RANK") == "0"]
    first.send_signal(signal.SIGINT)
    first.wait(timeout=300)
    out, own, codes = ended(run, b"")
    assert out == b""
    assert codes == {0: 130}
    assert own[-1].startswith("streamchat: stopped: 12 lines")
    assert not any(process.is_running() for process in processes)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_failure_of_the_first_process_ends_both(runs):
    """In the middle of a stream: one line, and its exit code."""
    _, own, codes = ended(runs["full"])
    assert codes[0] == 1
    assert codes.get(1, 0) in (0, -signal.SIGTERM)
    assert "No space left" in own[-1]


# Orders


class InOne(Ranks):
    """Two processes in one: what the first orders is carried out at once."""

    def __init__(self, model):
        self.rank, self.size = 0, 2
        self._numbers, self._dropped = itertools.count(), deque()
        self.others = Counterparts()
        self.model = self.number()
        self.others.add(self.model, model)

    @property
    def held(self):
        return self.others._held

    def tell(self, order):
        self.others.drop([self._dropped.popleft() for _ in range(len(self._dropped))])
        with suppress(StreamchatError):  # the first process meets the same
            self.others.obey(pickle.loads(pickle.dumps(order)))

    @contextmanager
    def together(self):
        yield


@pytest.fixture
def led():
    """A model that is led, and the processes."""
    ranks, model = InOne(tiny_model(num_layers=2)), tiny_model(num_layers=2)
    lead(model, ranks.model, ranks)
    return model, ranks


def assert_in_step(cache, ranks):
    other = ranks.held[cache.number]
    own, others = type(other).snapshot(cache), other.snapshot()
    assert own.num_seen == others.num_seen
    assert own.tensors.keys() == others.tensors.keys()
    for name, tensor in own.tensors.items():
        assert torch.equal(tensor, others.tensors[name])


@pytest.mark.parametrize("policy", ["sink", "dense", "h2o", "snapkv"])
def test_counterparts_stay_in_step(led, policy):
    """Whatever is done to a cache, in any order; nothing is held for longer than it is needed."""
    model, ranks = led
    size = 500 if policy == "dense" else 10
    config = CacheConfig(policy=policy, sink_size=2, window_size=size)
    chance = random.Random(0)
    caches = [make_cache(model, config)]
    snapshots = [caches[0].snapshot()]
    singles = 0
    for _ in range(100):
        cache = chance.choice(caches)
        action = chance.choice(["feed", "token", "snapshot", "restore", "fork", "rewind", "reset"])
        if action == "feed":
            forward(model, random_ids(chance.randint(2, 9), seed=chance.randrange(1000)), cache)
        elif action == "token":
            forward(model, random_ids(1, seed=chance.randrange(1000)), cache)
            singles += 1
        elif action == "snapshot":
            snapshots = [*snapshots[-1:], cache.snapshot()]
        elif action == "restore":
            cache.restore(chance.choice(snapshots))
        elif action == "fork":
            caches = [*caches[-1:], cache.fork()]
        elif action == "rewind":
            cache.rewind(min(1, len(cache._undo)))
        elif action == "reset":
            cache.reset()
        for each in caches:
            assert_in_step(each, ranks)
    assert singles
    del cache, each
    gc.collect()
    caches[0].set_undo_depth(2)  # any order carries what can be dropped
    assert len(ranks.held) == 1 + len(caches) + len(snapshots)


def test_after_a_full_stream_all_go_on(led):
    """An error that all processes meet parts nobody."""
    model, ranks = led
    cache = make_cache(model, CacheConfig(policy="dense", sink_size=0, window_size=8))
    forward(model, random_ids(6), cache)
    with pytest.raises(StreamFullError):
        forward(model, random_ids(3), cache)
    assert_in_step(cache, ranks)
    forward(model, random_ids(2), cache)
    assert_in_step(cache, ranks)


def test_rows_positions_and_depths_are_passed_on(led):
    """All that a cache is made with, and its other methods."""
    model, ranks = led
    config = CacheConfig(sink_size=2, window_size=1)
    cache = SinkCache.for_model(model, config, batch_size=3, start_position=7)
    ids = random_ids(6, batch_size=3)
    forward(model, ids[:, :4], cache)
    cache.skip(1000)
    forward(model, ids[:, 4:5], cache)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert_in_step(cache, ranks)
    other = ranks.held[cache.number]
    assert (other.batch_size, other.start_position) == (3, 7)
    fork = cache.fork()
    fork.set_undo_depth(3)
    assert_in_step(fork, ranks)
    assert ranks.held[fork.number]._undo.maxlen == 3


def test_a_stream_of_a_led_model_is_any_stream(led, loaded):
    """The same numbers as without others."""
    model, _ = led
    own = type(loaded)(loaded.source, model, loaded.tokenizer, frozenset())
    alone = type(loaded)(loaded.source, tiny_model(num_layers=2), loaded.tokenizer, frozenset())
    assert isinstance(Stream(own).cache, mirrored(SinkCache))
    assert walk(own) == walk(alone)


def test_what_the_others_would_not_follow_is_refused(led, two_layers):
    """A forward pass of the model itself, and what they do not hold."""
    model, ranks = led
    config = CacheConfig(window_size=5)
    with pytest.raises(StateError, match="would not follow"):
        model(random_ids(3))
    foreign = SinkCache(config, model.streamchat_binding.geometry)
    with pytest.raises(StateError, match="lack this cache"):
        forward(model, random_ids(3), foreign)
    cache = SinkCache.for_model(model, config)
    with pytest.raises(StateError, match="other processes"):
        cache.restore(SinkCache.for_model(two_layers, config).snapshot())
    forward(model, random_ids(3), cache)
    assert_in_step(cache, ranks)


# What is known beforehand


@pytest.fixture
def two(monkeypatch):
    """Plan as one of two processes."""

    class Two(Ranks):
        def __init__(self):
            self.rank, self.size = 0, 2

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(ranks_module, "_joined", [Two()])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_key_value_heads": 1}, "4 heads on 1 key/value heads"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"comes quantized \(gptq\)"),
        ({"base_model_tp_plan": None}, "no tensor-parallel plan"),
    ],
)
def test_what_cannot_be_shared_is_refused(fields, message):
    """By the configuration alone, in one line."""
    config = family_config("llama")
    check_plan(config, "tiny", 2)
    for name, value in fields.items():
        setattr(config, name, value)
    with pytest.raises(UnsupportedModelError, match=message):
        check_plan(config, "tiny", 2)


def test_heads_that_are_gathered_need_not_be_shared_out():
    """Olmo 2 has a norm over all of them."""
    check_plan(family_config("olmo2"), "tiny", 3)
    with pytest.raises(UnsupportedModelError):
        check_plan(family_config("llama"), "tiny", 3)


def test_each_process_holds_its_share(folder, two, monkeypatch):
    """Of weights and cache; processes of one node share its main memory."""
    alone = plan(str(folder), device="cpu", quantize="none")
    found = plan(str(folder), tensor_parallel=True)
    assert found.scheme is None
    assert weight_bytes(found) == weight_bytes(alone) // 2
    assert cache_bytes(found, 64) == cache_bytes(alone, 64) // 2
    need = weight_bytes(found) + cache_bytes(found, 64)
    cache = CacheConfig(sink_size=4, window_size=60)
    for room, fits in ((2 * need, True), (2 * need - 2, False)):
        monkeypatch.setattr("streamchat.model.fit.free_bytes", lambda device, room=room: room)
        with nullcontext() if fits else pytest.raises(StreamchatError, match="more processes"):
            check_memory(found, cache)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "int8"}, "--quantize int8"),
        ({"device": "cpu"}, "--device cpu"),
        ({"device_map": "auto"}, "--device-map"),
        ({"policy": "recompute"}, "--policy recompute"),
    ],
)
def test_options_that_exclude_each_other(folder, options, message):
    """Before any other process is met."""
    with pytest.raises(ConfigError, match=message):
        plan(str(folder), tensor_parallel=True, **options)


def test_one_process_is_not_several(monkeypatch):
    """Torchrun says so; others set WORLD_SIZE, too."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not is_one_of_several()
    with pytest.raises(ConfigError, match="torchrun"):
        join()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert is_one_of_several()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not is_one_of_several()


def test_a_shared_model_is_fed_eagerly(loaded, monkeypatch):
    """Its exchange is neither compiled nor captured, and no state of it saved."""
    model = tiny_model()
    geometry = replace(model.streamchat_binding.geometry, device=torch.device("cuda"))
    assert why_not_captured(model, geometry) is None
    monkeypatch.setattr(type(model), "tp_size", 2)
    assert choose_decode_step(model, geometry) is None
    assert "processes" in why_not_captured(model, geometry)
    assert why_slow(model) == "it is shared by 2 processes"
    with pytest.raises(StateError, match="one of several"):
        replace(loaded, model=model).fingerprint()


def test_layers_with_different_shares_are_refused(monkeypatch):
    """The cache has as many heads in all layers."""
    model = tiny_model(num_layers=2)
    assert sharded.kv_heads_here(model) == 2
    attention = model.model.layers[1].self_attn
    for name in ("k_proj", "v_proj"):
        half = torch.nn.Linear(32, 8, bias=False)
        setattr(attention, name, half)
    attention.num_key_value_groups = 4
    with pytest.raises(UnsupportedModelError, match=r"\[1, 2\] key/value heads"):
        sharded.kv_heads_here(model)
    attention.q_proj = torch.nn.Linear(31, 32)
    with pytest.raises(UnsupportedModelError, match="plan for 1 processes fails"):
        sharded.kv_heads_here(model)


def test_a_chat_of_several_processes_is_not_kept(monkeypatch):
    """None of them has all of a state: it is said, or refused where a session was asked for."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = []
    messages = SimpleNamespace(say=said.append)
    assert open_journal(None, continues=False, no_log=False, messages=messages) is None
    assert "not logged" in said[0]
    for options in ({"name": "tea", "continues": False}, {"name": None, "continues": True}):
        with pytest.raises(UsageError, match="cannot be kept"):
            open_journal(**options, no_log=False, messages=messages)
