"""Models whose layers lie in several memories: as exact as in one.

The oracle is the same model in main memory. Disk stands in for what a machine without a GPU lacks:
accelerate's hooks are the same.
"""

import gc
import os
import platform
from types import SimpleNamespace

import pytest
import torch
from conftest import byte_tokenizer, random_ids
from families import ROWS, all_slowly, family_model, skip_without_interface
from transformers import GPT2Config, GPT2LMHeadModel
from walk import walk

from streamchat import CacheConfig, CacheGeometry, ConfigError, SinkCache, Stream, load
from streamchat.model import dispatch, fit
from streamchat.model.decode import choose_decode_step
from streamchat.model.dispatch import attend_at_home, home_of, is_dispatched
from streamchat.model.fit import check_memory, choose_window
from streamchat.model.plan import plan
from streamchat.ops.rotary import default_inv_freq

MIXED = {
    "model.embed_tokens": "disk",
    "model.layers": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """An empty folder in the place of the user's cache."""
    folder = tmp_path / "offload"
    monkeypatch.setattr(dispatch, "offload_root", lambda: folder)
    return folder


@pytest.fixture
def little_memory(monkeypatch):
    """Room for a third of the tiny model."""
    monkeypatch.setattr(dispatch, "get_max_memory", lambda: {"cpu": 80_000})


@pytest.fixture
def family_folder(tmp_path):
    """Save the tiny model of a family."""

    def save(name):
        skip_without_interface(name)
        folder = tmp_path / "model"
        family_model(name, vocab_size=260).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        return folder

    return save


@pytest.mark.parametrize("device_map", [MIXED, {"": "disk"}])
def test_layers_on_disk_give_the_same_numbers(tiny_folder, device_map):
    """Scores and greedy ids, past evictions, forked and taken back; the self-check runs, too."""
    plain = load(str(tiny_folder), device="cpu", quantize="none")
    spread = load(str(tiny_folder), device_map=device_map)
    assert is_dispatched(spread.model)
    assert any(parameter.device.type == "meta" for parameter in spread.model.parameters())
    assert walk(spread) == walk(plain)


@pytest.mark.parametrize("device_map", ["auto", "balanced", "sequential"])
def test_what_finds_no_room_in_memory_goes_to_disk(tiny_folder, little_memory, device_map):
    """Chosen by accelerate, from what is free."""
    spread = load(str(tiny_folder), device_map=device_map)
    assert "disk" in spread.model.hf_device_map.values()
    assert walk(spread) == walk(load(str(tiny_folder), device="cpu", quantize="none"))


def test_caches_have_their_room(tiny_folder, monkeypatch):
    """What they will take is kept free of weights."""
    monkeypatch.setattr(dispatch, "get_max_memory", lambda: {0: 1000, "cpu": 2000})
    assert dispatch.placement("auto", 300)["max_memory"] == {0: 600, "cpu": 1800}
    assert dispatch.placement("auto", 1000)["max_memory"] == {0: 0, "cpu": 1800}
    assert "max_memory" not in dispatch.placement({"": "cpu"}, 300)


@pytest.mark.parametrize("name", all_slowly(ROWS))
def test_every_family_gives_the_same_numbers(family_folder, name):
    """Wrapped attention, learned sinks, tables of sines, longrope, ALiBi, two kinds of layers."""
    folder = str(family_folder(name))
    # Llama 4 itself looks where its embedding lies, and takes it for a device.
    keeps_embedding = {**MIXED, "model.embed_tokens": "cpu"}
    device_map = keeps_embedding if name == "llama4_text" else {"": "disk"}
    got = walk(load(folder, device_map=device_map))
    expected = walk(load(folder, device="cpu", quantize="none"))
    # Weights that are written anew may be summed up in another order.
    assert got.pop("scores") == pytest.approx(expected.pop("scores"), abs=1e-5)
    assert got == expected


def test_weights_that_must_be_written_anew_go_with_the_model(family_folder, root):
    """Experts are stored one by one, and held together."""
    folder = str(family_folder("mixtral"))
    spread = load(folder, device_map={"": "disk"})
    other = load(folder, device_map={"": "disk"}, check=False)
    assert len(list(root.glob("*/*"))) == 8  # two files a layer, for each of the models
    del other
    gc.collect()
    assert walk(spread) == walk(load(folder, device="cpu", quantize="none"))
    del spread
    gc.collect()
    assert not list(root.glob("*/*"))


def test_what_dead_processes_left_is_removed(root, monkeypatch):
    """Of this machine alone: the folder may be shared with others."""
    monkeypatch.setattr(dispatch.psutil, "pid_exists", lambda pid: pid == os.getpid())
    host = platform.node()
    dead, alive = root / f"{host}-999999-a", root / f"{host}-{os.getpid()}-a"
    elsewhere = root / "elsewhere-999999-a"
    for folder in (dead, alive, elsewhere):
        folder.mkdir(parents=True)
    new = dispatch.new_folder()
    assert not dead.exists()
    assert alive.is_dir()
    assert elsewhere.is_dir()
    assert not new.exists()


@pytest.mark.parametrize("policy", ["recompute", "h2o", "dense"])
def test_other_policies(tiny_folder, policy):
    """Whatever is held, of layers on disk as of others."""
    config = CacheConfig(policy=policy, window_size=24)
    ids = random_ids(24 if policy == "dense" else 40)[0].tolist()
    plain, spread = (
        Stream(load(str(tiny_folder), cache_config=config, **options), config).score(ids)
        for options in ({"device": "cpu", "quantize": "none"}, {"device_map": {"": "disk"}})
    )
    assert plain == spread


def test_a_model_with_learned_positions(tmp_path):
    """It has its own forward pass only, and is computed anew."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": 260}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    config = CacheConfig(policy="recompute", window_size=12)
    ids = random_ids(30)[0].tolist()
    plain, spread = (
        Stream(load(str(tmp_path), cache_config=config, **options), config).score(ids)
        for options in ({"device": "cpu", "quantize": "none"}, {"device_map": {"": "disk"}})
    )
    assert plain == spread


def test_a_state_is_known_again(tiny_folder):
    """By the weights in memory; those on disk are not read for it."""
    some, same = (load(str(tiny_folder), device_map=MIXED, check=False) for _ in range(2))
    assert some.fingerprint() == same.fingerprint()
    other = load(str(tiny_folder), device="cpu", quantize="none", check=False)
    assert some.fingerprint() != other.fingerprint()


def test_a_spread_model_is_fed_eagerly(tiny_folder):
    """And a line says so, also where a dtype is asked for."""
    spread = load(str(tiny_folder), device_map=MIXED, dtype="bfloat16")
    assert spread.model.dtype == torch.bfloat16
    assert choose_decode_step(spread.model, spread.model.streamchat_binding.geometry) is None
    assert "--device-map" in spread.slow_reason
    assert spread.device == CPU


def test_the_home_of_caches():
    """The first GPU in the map; main memory where there is none."""

    class Placed:
        device = torch.device("meta")

        def __init__(self, *devices):
            self.hf_device_map = dict(enumerate(devices))

    assert home_of(Placed("disk", "cpu")) == CPU
    assert home_of(Placed("cpu", 1, 0)) == torch.device("cuda", 1)
    assert home_of(Placed("disk", "cuda:2")) == torch.device("cuda", 2)
    assert home_of(Placed("mps", "disk")) == torch.device("mps")


@pytest.mark.gpu
def test_a_layer_may_lie_elsewhere_than_its_cache():
    """Queries, keys and values come from the GPU, and the result goes back there."""
    geometry = CacheGeometry(
        num_layers=1, num_kv_heads=2, head_dim=16, inv_freq=default_inv_freq(16, theta=10_000.0)
    )
    here, there = (SinkCache(CacheConfig(window_size=5), geometry) for _ in range(2))
    module = SimpleNamespace(
        layer_idx=0, streamchat_binding=SimpleNamespace(geometry=geometry, cache=there)
    )
    for num_tokens in (7, 1, 3):
        three = torch.randn(3, 1, 2, num_tokens, 16)
        with here.step(num_tokens), there.step(num_tokens):
            expected = here.attend(0, *three)
            got = attend_at_home(module, *three.cuda(), None)
        assert got.is_cuda
        assert torch.equal(got.cpu(), expected)


def test_free_memory_counts_everywhere(tiny_folder, monkeypatch):
    """The window has the room that weights leave in all memories, and no more than its own has."""
    free = {"cuda": 30_000_000, "cpu": 70_000_000}
    gpus = [torch.device("cuda", index) for index in range(2)]
    monkeypatch.setattr(fit, "free_bytes", lambda device: free[device.type])
    monkeypatch.setattr(dispatch, "free_bytes", lambda device: free[device.type])
    monkeypatch.setattr(dispatch, "devices_here", lambda home: [*gpus, CPU])
    assert dispatch.free_everywhere(gpus[0]) == 130_000_000
    found = plan(str(tiny_folder), device_map="auto")
    per_token = fit.cache_bytes(found, 1)
    weights = fit.weight_bytes(found)
    auto = CacheConfig(is_auto=True)
    free |= {"cuda": 0, "cpu": int((weights + per_token * 2048) / fit.AUTO_SHARE) + 1}
    assert choose_window(found, auto).cache_size == 2048
    free["cpu"] = 1000
    assert choose_window(found, auto).cache_size == 1024
    check_memory(found, auto)  # refuses nothing


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_map": "everywhere"}, "none, auto, balanced, sequential"),
        ({"device_map": "auto", "device": "cpu"}, "--device cpu"),
        ({"device_map": "auto", "quantize": "int8"}, "--quantize int8"),
    ],
)
def test_options_that_exclude_each_other(tiny_folder, options, message):
    """One line each."""
    with pytest.raises(ConfigError, match=message):
        load(str(tiny_folder), **options)


def test_the_command_line(command, tiny_folder, little_memory):
    """The same answer with layers on disk, and nothing but our own lines on stderr."""
    shared = ("pipe", "--mode", "reply", "-m", tiny_folder, "--window", "60", "--max-new", "30")
    plain = command(*shared, "--quantize", "none", stdin=b"one\ntwo\n")
    spread = command(*shared, "--device-map", "auto", stdin=b"one\ntwo\n")
    assert (spread.code, spread.out) == (0, plain.out)
    assert "(--device-map)" in spread.err
    assert all(line.startswith("streamchat: ") for line in spread.err.splitlines())
    wrong = command("pipe", "--device-map", "moon", stdin=b"one\n")
    assert wrong.code == 2
    assert "moon" in wrong.err
    told = command("info", tiny_folder, "--device-map", "auto", "--json")
    assert '"device_map": "auto"' in told.out
    assert '"quantize": "none"' in told.out
