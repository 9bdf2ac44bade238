"""Checkpoints that come quantized: left as they are, or refused before their weights are read.

Their libraries are not installed here. Configurations stand for the checkpoints; one of FP8 weights
is made by hand, since a machine without CUDA needs no library for it.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import tiny_model
from safetensors.torch import load_file, save_file

from streamchat import CacheConfig, ModelError, Stream, load
from streamchat.model import fit, prequantized
from streamchat.model.fit import choose_window, weight_bytes
from streamchat.model.plan import plan

CONFIGS = {
    "bitsandbytes": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "gptq": {"bits": 4, "group_size": 128},
    "awq": {"bits": 4, "group_size": 128},
    "fp8": {"activation_scheme": "dynamic", "weight_block_size": [32, 32]},
    "mxfp4": {},
    "compressed-tensors": {"format": "pack-quantized", "config_groups": {}},
}
CPU, CUDA = torch.device("cpu"), torch.device("cuda")

every_method = pytest.mark.parametrize("method", CONFIGS)


@pytest.fixture
def folder(tiny_folder, tmp_path):
    """A copy of the tiny model's folder, to be changed."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "quantized"))


@pytest.fixture
def installed(monkeypatch):
    """Say which packages are there."""

    def only(*names):
        monkeypatch.setattr(prequantized, "find_spec", lambda name: name in names or None)

    return only


def mark(folder, method):
    """Let a folder's configuration say that its weights are quantized."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": method, **CONFIGS[method]}
    file.write_text(json.dumps(config), encoding="utf-8")


def refusal(call, *args, **options):
    with pytest.raises(ModelError) as caught:
        call(*args, **options)
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)
    return str(caught.value)


@every_method
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_it_is_not_quantized_once_more(folder, method, scheme):
    """Whatever is installed: the message names the method and the way out; no weights are read."""
    mark(folder, method)
    (folder / "model.safetensors").unlink()
    message = refusal(load, str(folder), device="cpu", quantize=scheme)
    assert f"comes quantized ({method}) and cannot be quantized to {scheme}" in message
    assert "leave --quantize out" in message


@pytest.mark.parametrize(
    ("method", "packages"),
    [
        ("bitsandbytes", "bitsandbytes"),
        ("gptq", "optimum gptqmodel"),
        ("awq", "gptqmodel"),
        ("compressed-tensors", "compressed-tensors"),
    ],
)
def test_a_library_that_is_missing_is_named_before_weights_are_read(
    folder, installed, method, packages
):
    """What to install, as a command; here without any weights to read."""
    mark(folder, method)
    (folder / "model.safetensors").unlink()
    installed()
    message = refusal(load, str(folder), device="cpu")
    assert message == (
        f"model 'quantized' comes quantized ({method}), which needs "
        f"{packages.replace(' ', ' and ')}: pip install {packages}"
    )


def test_only_what_is_missing_is_named(folder, installed):
    """With optimum there, gptqmodel alone."""
    mark(folder, "gptq")
    installed("optimum")
    assert refusal(load, str(folder), device="cpu").endswith(
        "needs gptqmodel: pip install gptqmodel"
    )


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_kernels_are_wanted_on_cuda_only(folder, installed, method):
    """Elsewhere these weights are made to 16 bits and need no library."""
    mark(folder, method)
    installed()
    config = plan(str(folder), device="cpu").config
    prequantized.check(config, "x", "auto", CPU)
    message = refusal(prequantized.check, config, "x", "auto", CUDA)
    assert message.endswith("needs kernels: pip install kernels")
    installed("kernels")
    prequantized.check(config, "x", "auto", CUDA)


@every_method
@pytest.mark.parametrize("quantize", ["auto", "none"])
def test_it_is_left_as_it_is(folder, installed, method, quantize):
    """No scheme of ours, though a CPU has int8 otherwise."""
    mark(folder, method)
    installed("bitsandbytes", "optimum", "gptqmodel", "compressed_tensors")
    found = plan(str(folder), device="cpu", quantize=quantize)
    assert found.scheme is None
    assert found.is_own_choice  # nobody is told that it could be faster
    assert prequantized.method_of(found.config) == method


def test_a_method_that_nobody_listed_is_left_to_transformers(folder, installed):
    """Only what is known is judged."""
    mark(folder, "awq")
    installed("gptqmodel")
    config = plan(str(folder), device="cpu").config
    config.quantization_config["quant_method"] = "something-new"
    prequantized.check(config, "x", "auto", CPU)


def test_an_old_bitsandbytes_config_names_no_method(folder, installed):
    """What bitsandbytes alone left out, transformers and we take for it."""
    mark(folder, "bitsandbytes")
    installed("bitsandbytes")
    config = plan(str(folder), device="cpu").config
    del config.quantization_config["quant_method"]
    assert prequantized.method_of(config) == "bitsandbytes"


def test_a_plain_model_is_none_of_these(tiny_folder):
    """Nothing is asked of it."""
    config = plan(str(tiny_folder), device="cpu").config
    assert prequantized.method_of(config) is None
    prequantized.check(config, "x", "int8", CPU)


def test_its_size_is_that_of_its_files(folder, installed, monkeypatch):
    """A quarter of what the same model would take in float32, if the file is as small as that."""
    mark(folder, "awq")
    installed("gptqmodel")
    found = plan(str(folder), device="cpu")
    assert weight_bytes(found) == (folder / "model.safetensors").stat().st_size
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
    assert weight_bytes(found) == 1000
    monkeypatch.setattr(fit, "free_bytes", lambda device: 999)
    message = refusal(fit.check_memory, found)
    assert "0.00 GB (awq)" in message
    assert message.endswith("choose a smaller model")
    (folder / "model.safetensors").unlink()
    assert weight_bytes(found) is None
    fit.check_memory(found)
    assert choose_window(found, CacheConfig(is_auto=True)) == CacheConfig(is_auto=True)


def test_the_command_line_says_it_in_one_line(command, folder, installed):
    """Exit 3, in `info` as well, which names the method where the library is there."""
    mark(folder, "bitsandbytes")
    installed()
    done = command("pipe", "--mode", "score", "-q", "-m", folder, stdin=b"x\n")
    assert (done.code, done.out) == (3, "")
    assert len(done.err.splitlines()) == 1
    assert "pip install bitsandbytes" in done.err
    installed("bitsandbytes")
    facts = json.loads(command("info", folder, "--device", "cpu", "--json").out)
    assert facts["quantize"] == "bitsandbytes"


def test_fp8_weights_stream_on_a_cpu(tiny_folder, folder):
    """Weights of 8 bits with a scale for each block of 32 x 32, as DeepSeek's and Qwen's files are.

    The oracle is the same model with the weights that these stand for.
    """
    tensors, plain = {}, {}
    for name, tensor in load_file(tiny_folder / "model.safetensors").items():
        plain[name] = tensor
        tensors[name] = tensor
        if name.endswith("proj.weight"):
            rows, columns = tensor.shape
            blocks = tensor.view(rows // 32, 32, columns // 32, 32)
            scales = blocks.abs().amax(dim=(1, 3)) / 448
            codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
            plain[name] = (codes.float() * scales[:, None, :, None]).view(rows, columns)
            tensors[name] = codes.view(rows, columns)
            tensors[f"{name}_scale_inv"] = scales
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    mark(folder, "fp8")
    loaded = load(str(folder), device="cpu")
    expected = tiny_model(vocab_size=259, hidden_size=64, intermediate_size=128)
    expected.load_state_dict(plain)
    text = loaded.tokenizer.encode("some text")
    with torch.no_grad():
        logits = expected(torch.tensor([text])).logits[0].log_softmax(-1)
    losses = [-float(logits[i, token]) for i, token in enumerate(text[1:])]
    assert Stream(loaded).score(text)[1:] == pytest.approx(losses, rel=0.02)
