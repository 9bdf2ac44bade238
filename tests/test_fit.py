"""What a model will take, told before its weights are read: the window, refusals, the way out.

The oracle for sizes is the loaded model: the bytes of its parameters and buffers.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_model
from families import ROWS, family_config, family_model
from safetensors.torch import load_file, save_file

from streamchat import CacheConfig, ModelError, Stream, load
from streamchat.model import builtin, fit, gguf, memory, sizes
from streamchat.model.fit import check_memory, choose_window, weight_bytes
from streamchat.model.load import load_planned
from streamchat.model.plan import plan
from streamchat.model.quantize import QuantizedEmbedding, QuantizedLinear
from streamchat.model.sizes import file_bytes, take_census

PER_TOKEN = 2 * 1 * 2 * 16 * 4  # keys and values, layers, heads, head size, float32
AUTO = CacheConfig(is_auto=True)
CPU = torch.device("cpu")


@pytest.fixture
def copied(tiny_folder, tmp_path):
    """A copy of the tiny model's folder, to be changed."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "copied"))


@pytest.fixture
def models_folder(tmp_path, monkeypatch):
    """An empty folder in the place of the user's cache."""
    folder = tmp_path / "cache" / "models"
    monkeypatch.setattr(builtin, "models_folder", lambda: folder)
    return folder


@pytest.fixture
def free(monkeypatch):
    """Set how much memory is free, and for a moment."""

    def set_to(num_bytes, passing=1 << 60):
        monkeypatch.setattr(fit, "free_bytes", lambda device: num_bytes)
        monkeypatch.setattr(fit, "passing_bytes", lambda: passing)
        monkeypatch.setattr(gguf, "passing_bytes", lambda: passing)

    return set_to


def planned(folder, **options):
    return plan(str(folder), device="cpu", **options)


def change_config(folder, **fields):
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**config, **fields}), encoding="utf-8")


def held_bytes(model):
    """Bytes of a loaded model's weights, those that are shared once."""
    tensors = dict(model.named_parameters())
    for name, module in model.named_modules():
        if isinstance(module, (QuantizedLinear, QuantizedEmbedding)):
            tensors |= {f"{name}.{key}": buffer for key, buffer in module.named_buffers()}
    return sum({t.data_ptr(): t.nbytes for t in tensors.values()}.values())


# Sizes


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_take_what_was_said_before_they_were_read(
    tiny_folder, models_folder, quantize, dtype
):
    """To the byte, in each dtype and scheme."""
    found = planned(tiny_folder, quantize=quantize, dtype=dtype)
    said = weight_bytes(found)
    assert said == held_bytes(load_planned(found, check=False).model)


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_a_tied_head_is_counted_once(tmp_path, models_folder, quantize, tiny_folder):
    """A model whose head is its embedding."""
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "tied"))
    model = tiny_model(vocab_size=259, hidden_size=64, head_dim=16, tie_word_embeddings=True)
    model.save_pretrained(folder)
    found = planned(folder, quantize=quantize)
    assert weight_bytes(found) == held_bytes(load_planned(found, check=False).model)


@pytest.mark.parametrize("name", ROWS)
def test_every_family_is_counted_from_its_configuration(name):
    """As many weights as the model has."""
    model = family_model(name)
    assert take_census(family_config(name)).num_weights == sum(
        parameter.numel() for parameter in model.parameters()
    )


def test_counting_leaves_the_configuration_and_the_random_numbers_alone():
    """Building without storage is not seen afterwards."""
    config, state = family_config("llama"), torch.get_rng_state()
    before = config.to_dict()
    take_census(config)
    assert config.to_dict() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_what_cannot_be_built_has_no_size():
    """A configuration that the model's own code stumbles on refuses nothing here."""
    config = family_config("llama")
    config.hidden_act = "no such function"
    assert take_census(config) is None


def test_files_are_measured_without_being_read(copied):
    """One file, or those that the index names and no others; None where they are not there."""
    weights = load_file(copied / "model.safetensors")
    tensors = sum(tensor.nbytes for tensor in weights.values())
    assert tensors <= file_bytes(str(copied), None) <= tensors + 4096
    half = len(weights) // 2
    shards = {"a.safetensors": dict(list(weights.items())[:half])}
    shards["b.safetensors"] = dict(list(weights.items())[half:])
    for name, part in shards.items():
        save_file(part, copied / name, metadata={"format": "pt"})
    index = {key: name for name, part in shards.items() for key in part}
    (copied / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index}), encoding="utf-8"
    )
    assert file_bytes(str(copied), None) == sum((copied / name).stat().st_size for name in shards)
    for file in copied.glob("*.safetensors*"):
        file.unlink()
    assert file_bytes(str(copied), None) is None


def test_a_model_of_the_hub_is_measured_by_its_headers(monkeypatch):
    """What the Hub says of the tensors; None where it says nothing."""
    info = SimpleNamespace(data_offsets=(100, 350))
    files = {"a": SimpleNamespace(tensors={"x": info, "y": info}), "b": SimpleNamespace(tensors={})}
    asked = []

    def answer(name, revision):
        asked.append((name, revision))
        return SimpleNamespace(files_metadata=files)

    monkeypatch.setattr(sizes, "get_safetensors_metadata", answer)
    assert file_bytes("nobody/no-such-model", "abc") == 500
    assert asked == [("nobody/no-such-model", "abc")]

    def offline(name, revision):
        raise OSError("no network")

    monkeypatch.setattr(sizes, "get_safetensors_metadata", offline)
    assert file_bytes("nobody/no-such-model", "abc") is None


def test_free_memory_is_that_of_the_device(monkeypatch):
    """Available main memory on a CPU, the device's own on CUDA; swap for a moment only."""
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=10))
    monkeypatch.setattr(memory.psutil, "swap_memory", lambda: SimpleNamespace(free=5))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7, 99))
    assert memory.free_bytes(CPU) == 10
    assert memory.free_bytes(torch.device("cuda", 1)) == 7
    assert memory.passing_bytes() == 15


# The window


def test_a_number_stays_what_it_is(tiny_folder):
    """Only `--window auto` is chosen for."""
    asked = CacheConfig(window_size=77)
    assert choose_window(planned(tiny_folder), asked) is asked


def test_auto_is_bounded_by_the_trained_length(tiny_folder):
    """Sinks and window together, whatever the number of sinks."""
    for sinks in (0, 4, 100):
        chosen = choose_window(planned(tiny_folder), CacheConfig(sink_size=sinks, is_auto=True))
        assert (chosen.sink_size, chosen.cache_size) == (sinks, 4096)


@pytest.mark.parametrize("num_caches", [2, 3])
def test_auto_is_bounded_by_memory(tiny_folder, free, num_caches):
    """Weights and caches take no more than the share, and one step more would be too much."""
    found, num_free = planned(tiny_folder), 2_000_000
    free(num_free)
    chosen = choose_window(found, AUTO, num_caches)
    taken = weight_bytes(found) + num_caches * PER_TOKEN * chosen.cache_size
    assert taken <= fit.AUTO_SHARE * num_free < taken + num_caches * PER_TOKEN * fit.AUTO_STEP
    assert chosen.cache_size % fit.AUTO_STEP == 0


def test_a_huge_trained_length_is_bounded_by_memory_alone(copied, free):
    """Ten million tokens: as many as memory has room for."""
    change_config(copied, max_position_embeddings=10_000_000)
    free(2_000_000_000)
    size = choose_window(planned(copied), AUTO).cache_size
    assert 0.74 * 2e9 < size * PER_TOKEN + weight_bytes(planned(copied)) <= 0.75 * 2e9


def test_without_a_trained_length_auto_is_the_default(tiny_folder, monkeypatch):
    """Nothing says how far the model can look, so nothing larger than the default is tried."""
    monkeypatch.setattr(fit, "trained_length", lambda config: None)
    assert choose_window(planned(tiny_folder), AUTO) == AUTO


def test_without_a_known_size_auto_is_the_default(tiny_folder, monkeypatch):
    """How much memory is left for the cache is not known either."""
    monkeypatch.setattr(fit, "take_census", lambda config, **options: None)
    assert choose_window(planned(tiny_folder), AUTO) == AUTO


def test_auto_with_too_little_memory_is_the_default_or_what_was_trained(copied, free):
    """The refusal that follows names sizes; a tiny window would only hide what is wrong."""
    free(1000)
    assert choose_window(planned(copied), AUTO).cache_size == 1024
    change_config(copied, max_position_embeddings=64)
    assert choose_window(planned(copied), AUTO).cache_size == 64


def test_pinning_more_leaves_an_auto_cache_as_large_as_it_was():
    """A number still means that number; no sinks pin nothing."""
    auto = CacheConfig(sink_size=4, window_size=96, is_auto=True)
    assert (auto.pin(30).sink_size, auto.pin(30).window_size) == (30, 70)
    assert auto.pin(200).window_size == 1
    assert auto.pin(3) == auto
    number = CacheConfig(sink_size=4, window_size=96)
    assert (number.pin(30).sink_size, number.pin(30).window_size) == (30, 96)
    none = CacheConfig(sink_size=0, window_size=96)
    assert none.pin(30) == none


def test_what_auto_chose_streams(tiny_folder, free):
    """From the plan to a score."""
    free(1_000_000)
    found = planned(tiny_folder)
    cache = choose_window(found, AUTO)
    loaded = load_planned(found, cache)
    scores = Stream(loaded, cache).score(loaded.tokenizer.encode("some text"))
    assert len(scores) == len("some text")


# Refusals


def refusal(found, cache=None, num_caches=1):
    """The one line that a plan is refused with."""
    with pytest.raises(ModelError) as caught:
        check_memory(found, cache, num_caches)
    message = str(caught.value)
    assert caught.value.exit_code == 3
    assert "\n" not in message
    return message


def test_weights_that_do_not_fit_are_refused_with_sizes_and_what_would(tiny_folder, free):
    """Before they are read; only what would really fit is advised."""
    found = planned(tiny_folder, quantize="none")
    total = weight_bytes(found)
    free(total - 1)
    message = refusal(found)
    assert "model 'tiny-llama' does not fit into memory: its weights take 0.00 GB (float32)" in (
        message
    )
    assert message.endswith(
        "choose --quantize int8 or --quantize int4 or --dtype bfloat16 or a smaller model"
    )
    free(total // 3)
    assert refusal(found).endswith("choose --quantize int8 or --quantize int4 or a smaller model")
    free(1000)
    assert refusal(found).endswith("choose a smaller model")
    free(total)
    check_memory(found)


def test_a_cache_that_does_not_fit_is_refused_with_the_window_that_does(tiny_folder, free):
    """Caches count as often as there are some; the window named is the largest that passes."""
    found, cache = planned(tiny_folder, quantize="int4"), CacheConfig(window_size=2044)
    free(weight_bytes(found) + 3 * 2048 * PER_TOKEN - 1)
    check_memory(found, cache, 2)
    message = refusal(found, cache, 3)
    assert "and the cache 0.00 GB" in message
    assert "--window 2043 or a smaller model" in message
    check_memory(found, CacheConfig(window_size=2043), 3)


def test_what_is_free_and_taken_is_said_in_gigabytes(copied, free, models_folder):
    """A model of eight thousand million weights on a machine of six gigabytes."""
    change_config(
        copied,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128_256,
        dtype="bfloat16",
    )
    free(6_000_000_000)
    message = refusal(planned(copied), CacheConfig())
    assert "its weights take 8.53 GB (int8) and the cache 0.27 GB, and 6.00 GB are free" in message
    assert message.endswith("choose --quantize int4 or a smaller model")
    free(10_000_000_000, passing=20_000_000_000)
    message = refusal(planned(copied), CacheConfig())
    assert "cannot be quantized here: that takes 32 GB once" in message
    assert "and 20 GB are free" in message
    free(17_000_000_000, passing=20_000_000_000)
    assert refusal(planned(copied), CacheConfig()).endswith(
        "choose --dtype bfloat16 or a smaller model"
    )


def test_quantized_weights_that_are_kept_need_no_room_for_the_full_ones(
    tiny_folder, models_folder, tmp_path, free
):
    """The room for quantizing is wanted on first use only, and only where files are of 16 bits."""
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "half"))
    tiny_model(vocab_size=259, hidden_size=64, head_dim=16, dtype=torch.bfloat16).save_pretrained(
        folder
    )
    free(1 << 40, passing=1000)
    assert "cannot be quantized here" in refusal(planned(folder))
    check_memory(planned(tiny_folder))  # in float32: mapped
    free(1 << 40)
    load(str(folder), device="cpu")
    free(1 << 40, passing=1000)
    check_memory(planned(folder))


def test_a_size_that_is_not_known_refuses_nothing(tiny_folder, free, monkeypatch):
    """The loader goes on, however little is free."""
    monkeypatch.setattr(fit, "take_census", lambda config, **options: None)
    free(0)
    check_memory(planned(tiny_folder), CacheConfig(), 3)


def test_loading_asks_before_the_weights_are_read(copied, free):
    """There are no weights here: the refusal comes first, from `load` as well."""
    (copied / "model.safetensors").unlink()
    free(1000)
    with pytest.raises(ModelError, match="does not fit into memory"):
        load(str(copied), device="cpu")


def test_the_command_line_refuses_in_one_line(command, tiny_folder, free):
    """Exit 3, and nothing on standard output."""
    free(1000)
    done = command("pipe", "--mode", "score", "-q", "-m", tiny_folder, stdin=b"x\n")
    assert done.code == 3
    assert done.out == ""
    assert len(done.err.splitlines()) == 1
    assert "does not fit into memory" in done.err
