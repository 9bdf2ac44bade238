"""Weights of 8 and 4 bits: what is stored, the layers that read it, and the file it is kept in.

The oracles: numpy for the stored form, GGML's own code (the `gguf` package) for the values that
must survive, products in float64 for the layers. What a decode step makes of them is held against
torch in test_compiled.py.
"""

import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    BYTE_VOCAB_SIZE,
    FAMILIES,
    INITIALIZER_RANGE,
    VOCAB_SIZE,
    byte_tokenizer,
    random_ids,
)
from families import family_model
from gguf import GGMLQuantizationType
from gguf import quants as ggml
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GenerationConfig

from streamchat import ConfigError, ModelError, SinkCache, load
from streamchat.model import builtin
from streamchat.model import quantize as quantize_module
from streamchat.model.prepare import forward, prepare
from streamchat.model.quantize import (
    QuantizedEmbedding,
    QuantizedLinear,
    load_quantized,
    quantize_model,
    save,
    to_dtype,
    why_not_quantized,
)
from streamchat.model.selfcheck import self_check
from streamchat.ops import linear as linear_module
from streamchat.ops.compiled.matrix import matrix_times_rows
from streamchat.ops.linear import linear
from streamchat.ops.quantization import dequantize, fits, quantize

SCHEMES = {"int8": 8, "int4": 4}
GGML = {8: GGMLQuantizationType.Q8_0, 4: GGMLQuantizationType.Q4_1}
BITS = pytest.mark.parametrize("bits", [8, 4])


def random_matrix(rows, columns, *, seed=0, spread=0.3):
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(rows, columns, generator=generator)


@contextmanager
def threads(number):
    """As many threads as told, and afterwards as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# What is stored


def quantize_row(row, bits):
    """The oracle: one row's codes, scales and minima, group by group, in numpy."""
    codes, scales, minima = [], [], []
    for group in row.reshape(-1, 32):
        low = np.float16(0) if bits == 8 else np.float16(group.min())
        reach = np.abs(group).max() if bits == 8 else group.max() - np.float32(low)
        scale = np.float16(reach / np.float32(127 if bits == 8 else 15))
        steps = group - np.float32(low)
        steps = steps / np.float32(scale) if scale else np.zeros_like(steps)
        codes.append(np.clip(np.rint(steps), *((-127, 127) if bits == 8 else (0, 15))))
        scales.append(scale)
        minima.append(low)
    return np.concatenate(codes).astype(int), np.array(scales), np.array(minima)


def unpacked(codes):
    """Codes of a row in the order of its columns: bytes hold the first half low, the rest high."""
    if codes.dtype == np.int8:
        return codes.astype(int)
    return np.concatenate((codes % 16, codes // 16)).astype(int)


@BITS
@pytest.mark.parametrize("shape", [(1, 64), (3, 128), (5, 576), (2, 1536)], ids=str)
def test_the_stored_form(shape, bits):
    """Codes, scales and minima are numpy's, and a weight is scale * code + minimum."""
    weight = random_matrix(*shape)
    stored = quantize(weight, bits)
    read = dequantize(*stored)
    assert read.shape == shape
    assert read.dtype == torch.float32
    for row in range(shape[0]):
        codes, scales, minima = quantize_row(weight[row].numpy(), bits)
        assert np.array_equal(unpacked(stored.codes[row].numpy()), codes)
        expected = scales if bits == 8 else np.concatenate((scales, minima))
        assert stored.scales.dtype == torch.float16
        assert np.array_equal(stored.scales[row].numpy(), expected)
        value = codes * scales.repeat(32).astype(np.float64) + minima.repeat(32)
        assert np.allclose(read[row].numpy(), value, rtol=1e-6, atol=1e-7)


@BITS
@pytest.mark.parametrize("spread", [1e-3, 1.0, 100.0])
def test_no_weight_is_off_by_more_than_half_a_step(spread, bits):
    """Half a scale, and for 4 bits what the minimum lost in float16."""
    weight = random_matrix(64, 256, spread=spread)
    weight += 5 * spread * random_matrix(64, 1, seed=1)  # minima of both signs
    stored = quantize(weight, bits)
    error = (dequantize(*stored) - weight).abs().view(64, -1, 32)
    scales = stored.scales.float()
    minima = torch.zeros(64, 8)
    if bits == 4:
        scales, minima = scales.chunk(2, dim=1)
    allowed = scales.abs() / 2 + minima.abs() * 2**-11 + 1e-6 * spread
    assert bool((error <= allowed[..., None]).all())


@BITS
def test_weights_of_a_ggml_file_survive(bits):
    """What GGML's Q8_0 or Q4_1 blocks can hold is read back unchanged."""
    blocks = ggml.quantize(random_matrix(40, 256).numpy(), GGML[bits])
    weight = torch.from_numpy(ggml.dequantize(blocks, GGML[bits]).copy())
    read = dequantize(*quantize(weight, bits))
    # GGML rounds after the product with the scale, torch may fuse it: the last bit at most.
    assert torch.allclose(read, weight, rtol=2**-23, atol=2**-25)


@BITS
@pytest.mark.parametrize("value", [0.0, 1.0, -0.7, 0.1234567, 3e-7])
def test_a_group_of_equal_weights(value, bits):
    """No division by zero: zeros stay zeros, a constant is off by float16's rounding at most."""
    weight = torch.full((2, 128), value)
    weight[1, :64] = 0
    read = dequantize(*quantize(weight, bits))
    assert torch.allclose(read, weight, rtol=2**-10, atol=127 * 2**-25)
    assert bool((read[1, :64] == 0).all())


@BITS
def test_rows_can_be_read_alone(bits):
    """Rows picked by index, in any order and shape, are those of the whole."""
    stored = quantize(random_matrix(7, 128), bits)
    picked = torch.tensor([[6, 0, 3], [3, 3, 1]])
    rows = dequantize(stored.codes[picked], stored.scales[picked], torch.bfloat16)
    assert torch.equal(rows, dequantize(*stored)[picked].bfloat16())


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (32, (True, False)),
        (64, (True, True)),
        (96, (True, False)),
        (576, (True, True)),
        (48, (0, 0)),
    ],
)
def test_what_fits(columns, expected):
    """8 bits need whole groups of 32, 4 bits pairs of them."""
    assert (fits(columns, 8), fits(columns, 4)) == expected


# Products


def assert_product(got, x, weight, bias=None):
    """Against float64; an error is measured by the magnitudes that were added up."""
    x, weight = x.double(), weight.double()
    expected = x @ weight.T + (0 if bias is None else bias.double())
    assert got.shape == expected.shape
    size = x.abs() @ weight.abs().T + weight.abs().max() * x.abs().sum(dim=-1, keepdim=True)
    assert bool(((got.double() - expected).abs() <= 1e-6 * size).all())


@BITS
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 64), (101, 128), (77, 2048), (3, 192)], ids=str)
def test_few_tokens_times_a_matrix(shape, has_bias, bits):
    """One to seven tokens: the products of the dequantized weights.

    Odd numbers of rows and groups, one piece of work and several.
    """
    stored = quantize(random_matrix(*shape), bits)
    bias = random_matrix(1, shape[0], seed=5)[0] if has_bias else None
    for num_tokens in range(1, 8):
        x = random_matrix(num_tokens, shape[1], seed=num_tokens, spread=3)
        got = matrix_times_rows(*stored, x, bias)
        assert_product(got, x, dequantize(*stored), bias)


@BITS
def test_tokens_that_do_not_lie_side_by_side(bits):
    """Views with strides, and more than one leading dimension."""
    stored = quantize(random_matrix(33, 64), bits)
    weight = dequantize(*stored)
    wide = random_matrix(64, 12, seed=2)
    for x in (wide.T[:5], wide.T[::3], random_matrix(6, 128)[:, ::2].view(2, 3, 64)):
        assert_product(matrix_times_rows(*stored, x, None), x, weight)


@BITS
def test_the_number_of_threads_changes_no_bit(bits):
    """Each row is one sum, whoever computes it."""
    stored = quantize(random_matrix(301, 1024), bits)
    x = random_matrix(3, 1024, seed=1)
    results = []
    for number in (1, 2, 3, 2):
        with threads(number):
            results.append(matrix_times_rows(*stored, x, None))
    assert all(torch.equal(result, results[0]) for result in results)


@BITS
def test_a_nan_stays_one(bits):
    """Broken activations do not come out as numbers."""
    x = random_matrix(1, 64)
    x[0, 5] = torch.nan
    got = matrix_times_rows(*quantize(random_matrix(4, 64), bits), x, None)
    assert bool(got.isnan().all())


@pytest.mark.parametrize("has_onednn", [True, False])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("lead", [(1,), (7,), (8,), (40,), (2, 5)], ids=str)
def test_many_tokens_times_a_matrix(monkeypatch, lead, has_bias, has_onednn):
    """By oneDNN and without, float32 products are those of float64."""
    monkeypatch.setattr(linear_module, "HAS_ONEDNN", linear_module.HAS_ONEDNN and has_onednn)
    weight, bias = random_matrix(33, 96), random_matrix(1, 33)[0] if has_bias else None
    x = random_matrix(int(np.prod(lead)), 192, seed=1)[:, ::2].view(*lead, 96)
    assert_product(linear(x, weight, bias), x, weight, bias)


def test_products_in_16_bit_are_torchs():
    """Only float32 goes to oneDNN here."""
    x, weight = random_matrix(16, 64).bfloat16(), random_matrix(8, 64).bfloat16()
    assert torch.equal(linear(x, weight, None), nn.functional.linear(x, weight))


# Layers


@BITS
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_gives_the_same_to_few_and_to_many(bits, has_bias):
    """A token alone, seven and twenty at once: the same rows, by either way."""
    stored = quantize(random_matrix(50, 128), bits)
    bias = random_matrix(1, 50)[0] if has_bias else None
    layer, x = QuantizedLinear(stored, bias), random_matrix(20, 128, seed=1)
    for size in (1, 7, 20):
        got = torch.cat([layer(part) for part in x.split(size)])
        assert_product(got, x, dequantize(*stored), bias)


@BITS
@pytest.mark.parametrize("block_weights", [1, 128, 640, 10_000])
def test_a_large_layer_is_computed_in_blocks(monkeypatch, bits, block_weights):
    """However many rows are dequantized at once, with a bias, in shape (2, 10, ...)."""
    stored = quantize(random_matrix(51, 128), bits)
    bias, x = random_matrix(1, 51)[0], random_matrix(20, 128, seed=1).view(2, 10, 128)
    monkeypatch.setattr(quantize_module, "BLOCK_WEIGHTS", block_weights)
    assert_product(QuantizedLinear(stored, bias)(x), x, dequantize(*stored), bias)


def test_an_embedding_gives_its_rows():
    """For ids of any shape, in the dtype it was told."""
    stored = quantize(random_matrix(11, 64), 8)
    ids = torch.tensor([[0, 10, 3], [3, 5, 0]])
    rows = QuantizedEmbedding(stored, torch.float16)(ids)
    assert torch.equal(rows, dequantize(*stored)[ids].half())


# Models


def whole_model(family="llama", *, num_layers=2, seed=0, **overrides):
    """A random model that fits both schemes, not prepared; biases and norms are random too."""
    config_class, model_class, extra = FAMILIES[family]
    fields = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": INITIALIZER_RANGE,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **extra,
        **({"head_dim": 16} if family == "qwen3" else {}),
        **overrides,
    }
    torch.manual_seed(seed)
    model = model_class(config_class(**fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    return model


KINDS = {
    "untied": ("llama", {"tie_word_embeddings": False}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("qwen2", {}),
}
KIND = pytest.mark.parametrize("kind", KINDS)
SCHEME = pytest.mark.parametrize("scheme", SCHEMES)


def quantized(kind, scheme):
    family, overrides = KINDS[kind]
    model = whole_model(family, **overrides)
    quantize_model(model, scheme)
    return model


def logits(model, num_tokens=30):
    with torch.no_grad():
        return model(random_ids(num_tokens), use_cache=False).logits


@SCHEME
@KIND
def test_a_quantized_model_computes_with_the_rounded_weights(kind, scheme):
    """Its logits are those of the whole model after each matrix has been rounded by itself."""
    family, overrides = KINDS[kind]
    whole = whole_model(family, **overrides)
    head, embedding = whole.lm_head.weight, whole.model.embed_tokens.weight
    with torch.no_grad():
        for parameter in whole.parameters():
            if parameter.ndim == 2:
                bits = 8 if parameter is head or parameter is embedding else SCHEMES[scheme]
                parameter.copy_(dequantize(*quantize(parameter, bits)))
    expected = logits(whole)
    tolerance = 1e-5 * float(expected.abs().max())
    assert torch.allclose(logits(quantized(kind, scheme)), expected, rtol=0, atol=tolerance)


@SCHEME
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_head_keeps_8_bits_and_shares_the_table_it_is_tied_to(is_tied, scheme):
    """Tied, both read one memory; untied, each has its own; under int4 both have 8 bits."""
    model = quantized("tied" if is_tied else "untied", scheme)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert isinstance(head, QuantizedLinear)
    assert isinstance(embedding, QuantizedEmbedding)
    assert (head.codes.data_ptr() == embedding.codes.data_ptr()) == is_tied
    assert head.codes.dtype == embedding.codes.dtype == torch.int8
    inner = model.model.layers[0].mlp.down_proj.codes
    assert inner.dtype == (torch.int8 if scheme == "int8" else torch.uint8)
    assert not any(isinstance(module, nn.Linear) for module in model.modules())


@SCHEME
def test_another_dtype_leaves_codes_and_scales(scheme):
    """Norms, biases and embeddings take the dtype; what is quantized stays bit for bit."""
    model = quantized("biases", scheme)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert to_dtype(model, torch.bfloat16) is model
    for name, tensor in model.state_dict().items():
        if name.endswith(("codes", "scales")):
            assert torch.equal(tensor, before[name])
        else:
            assert torch.equal(tensor, before[name].bfloat16())
    assert model.dtype == model.config.dtype == torch.bfloat16
    assert logits(model).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("overrides", "for_int8", "for_int4"),
    [
        ({}, None, None),
        ({"intermediate_size": 96}, None, "down_proj has 96 inputs"),
        ({"intermediate_size": 100}, "down_proj has 100 inputs", "down_proj has 100 inputs"),
        ({"hidden_size": 96, "head_dim": 16}, None, "has 96 inputs"),
        ({"hidden_size": 48}, "has 48 inputs", "has 48 inputs"),
    ],
    ids=str,
)
def test_why_a_model_is_not_quantized(overrides, for_int8, for_int4):
    """The first layer that does not fit is named with its inputs, in a line."""
    model = whole_model(num_layers=1, **overrides)
    for scheme, expected in (("int8", for_int8), ("int4", for_int4)):
        reason = why_not_quantized(model, scheme)
        if expected is None:
            assert reason is None
        else:
            assert expected in reason
            assert "\n" not in reason


# The file it is kept in


@pytest.fixture
def kept(tmp_path):
    """Write a quantized model to a file; read one back."""

    def write(model):
        save(model, tmp_path / "cache" / "kept.safetensors", str(tmp_path))
        GenerationConfig(eos_token_id=[2, 7]).save_pretrained(tmp_path)
        return tmp_path / "cache" / "kept.safetensors"

    return write


def read_back(model, file, dtype=torch.float32):
    return load_quantized(str(file.parents[1]), model.config, file, dtype)


@SCHEME
@KIND
def test_what_is_kept_is_read_back_bit_for_bit(kind, scheme, kept):
    """The same logits, the generation configuration of the folder, and a tied head still tied."""
    model = quantized(kind, scheme)
    file = kept(model)
    again = read_back(model, file).eval()
    assert torch.equal(logits(again), logits(model))
    assert again.generation_config.eos_token_id == [2, 7]
    head, embedding = again.get_output_embeddings(), again.get_input_embeddings()
    assert (head.codes.data_ptr() == embedding.codes.data_ptr()) == (kind == "tied")
    others = [path for path in file.parent.iterdir() if path != file]
    assert all(path.suffix == ".lock" and path.stat().st_size == 0 for path in others)


def test_a_model_without_generation_config_is_read_back(kept):
    """Many have none."""
    model = quantized("untied", "int8")
    file = kept(model)
    (file.parents[1] / "generation_config.json").unlink()
    assert torch.equal(logits(read_back(model, file).eval()), logits(model))


@pytest.mark.parametrize("kept_bytes", [0, 5, 1000, -1])
def test_a_file_cut_short_is_no_model(kept, kept_bytes):
    """Cut in its head, in its tensors, in its last byte."""
    model = quantized("untied", "int8")
    file = kept(model)
    file.write_bytes(file.read_bytes()[:kept_bytes])
    assert read_back(model, file) is None


@pytest.mark.parametrize("name", ["model.embed_tokens", "model.layers.0.mlp.down_proj"])
@pytest.mark.parametrize("part", ["codes", "scales"])
def test_a_file_with_a_matrix_of_another_shape_is_no_model(kept, name, part):
    """Rows that are missing are noticed when the file is read, and not in the first product."""
    model = quantized("untied", "int8")
    file = kept(model)
    tensors = load_file(file)
    tensors[f"{name}.{part}"] = tensors[f"{name}.{part}"][:-8].clone()
    save_file(tensors, file)
    assert read_back(model, file) is None


LACKING = [
    "model.embed_tokens.codes",
    "model.layers.1.mlp.up_proj.scales",
    "model.layers.0.input_layernorm.weight",
    "model.norm.weight",
    "model.layers.0.self_attn.k_proj.bias",
]


@pytest.mark.parametrize("name", LACKING)
def test_a_file_that_lacks_a_tensor_is_no_model(kept, name):
    """Nothing is made up: codes, scales, norms and biases must all be there."""
    model = quantized("biases", "int8")
    file = kept(model)
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file)
    assert read_back(model, file) is None


# Loading


def write_folder(folder, **overrides):
    """A model folder as a user would have."""
    whole_model(vocab_size=BYTE_VOCAB_SIZE, num_layers=1, **overrides).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def fitting(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("fitting") / "fitting")


@pytest.fixture(autouse=True)
def models_folder(tmp_path, monkeypatch):
    """An empty folder in the place of the user's cache."""
    folder = tmp_path / "models"
    monkeypatch.setattr(builtin, "models_folder", lambda: folder)
    return folder


def load_and_tell(folder, **options):
    """The model, and what loading it told."""
    messages = []
    model = load(str(folder), device="cpu", progress=messages.append, **options)
    return model, messages


def step_logits(loaded):
    """Logits after a chunk and a single token."""
    cache = SinkCache.for_model(loaded.model)
    forward(loaded.model, random_ids(10), cache)
    return forward(loaded.model, random_ids(1, seed=2), cache)


def stored_as(loaded):
    """The dtype of the codes of a layer, None for a whole one."""
    return getattr(loaded.model.model.layers[0].mlp.down_proj, "codes", torch.empty(0)).dtype


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, torch.int8),
        ({"quantize": "int8", "dtype": "bfloat16"}, torch.int8),
        ({"quantize": "int4"}, torch.uint8),
        ({"quantize": "none"}, torch.float32),
        ({"dtype": "float32"}, torch.float32),
    ],
    ids=str,
)
def test_how_weights_are_stored(fitting, models_folder, options, expected):
    """`auto` is int8 unless a dtype is asked for; only what is quantized is kept in a file."""
    loaded, messages = load_and_tell(fitting, **options)
    assert stored_as(loaded) == expected
    is_quantized = expected != torch.float32
    assert any("quantizing fitting" in message for message in messages) == is_quantized
    assert bool(list(models_folder.glob("fitting-*.safetensors"))) == is_quantized
    assert loaded.slow_reason is None


@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_is_quantized_once(fitting, scheme):
    """The second load reads the file: no word of quantizing, the same bits."""
    first, told = load_and_tell(fitting, quantize=scheme)
    second, told_again = load_and_tell(fitting, quantize=scheme)
    quantizing = f"quantizing fitting to {scheme} (once)"
    assert quantizing in told
    assert quantizing not in told_again
    assert torch.equal(step_logits(first), step_logits(second))


@pytest.mark.parametrize("change", ["time", "size"])
def test_changed_weights_are_quantized_anew(fitting, tmp_path, change):
    """A newer or a larger weights file is another model, and its weights are the ones used."""
    folder = Path(shutil.copytree(fitting, tmp_path / "fitting"))
    load_and_tell(folder)
    weights = folder / "model.safetensors"
    stamp = weights.stat()
    tensors = load_file(weights)
    tensors["model.norm.weight"] *= 2
    metadata = {"format": "pt"} | ({"note": "longer"} if change == "size" else {})
    save_file(tensors, weights, metadata=metadata)
    later = stamp.st_mtime_ns + (10**9 if change == "time" else 0)
    os.utime(weights, ns=(stamp.st_atime_ns, later))
    assert (weights.stat().st_size == stamp.st_size) == (change == "time")
    loaded, messages = load_and_tell(folder)
    assert any("quantizing" in message for message in messages)
    assert torch.equal(loaded.model.model.norm.weight, tensors["model.norm.weight"])


@pytest.mark.parametrize("damage", [b"", bytes(100), None], ids=["empty", "zeros", "cut"])
def test_a_damaged_file_is_replaced(fitting, models_folder, damage):
    """Cut or overwritten, the kept file is made again, and then serves."""
    first, _ = load_and_tell(fitting)
    (file,) = models_folder.glob("fitting-*.safetensors")
    file.write_bytes(file.read_bytes()[:-100] if damage is None else damage)
    second, told = load_and_tell(fitting)
    third, told_again = load_and_tell(fitting)
    assert any("quantizing" in message for message in told)
    assert not any("quantizing" in message for message in told_again)
    assert torch.equal(step_logits(first), step_logits(second))
    assert torch.equal(step_logits(first), step_logits(third))


def test_copies_of_models_that_are_gone_are_removed(fitting, tmp_path, models_folder):
    """Once a folder is gone, so is its copy after the next save; those of the others stay."""
    folder = Path(shutil.copytree(fitting, tmp_path / "gone"))
    load_and_tell(folder)
    load_and_tell(fitting)
    shutil.rmtree(folder)
    models_folder.joinpath("foreign-q1.safetensors").write_bytes(b"no safetensors")
    load_and_tell(fitting, quantize="int4")
    kept = sorted(file.name.split("-")[0] for file in models_folder.glob("*.safetensors"))
    assert kept == ["fitting", "fitting", "foreign"]


def test_a_cache_folder_that_cannot_be_written(fitting, tmp_path, monkeypatch):
    """The model loads all the same, and a line says that its weights are not kept."""
    blocked = tmp_path / "blocked"
    blocked.write_text("a file", encoding="utf-8")
    monkeypatch.setattr(builtin, "models_folder", lambda: blocked / "models")
    loaded, messages = load_and_tell(fitting)
    assert stored_as(loaded) == torch.int8
    assert any(message.startswith("cannot keep the quantized weights") for message in messages)


def test_a_full_disk(fitting, models_folder, monkeypatch):
    """What safetensors raises when it cannot write is no reason not to load."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    whole = quantize_module.save

    def save_on_a_full_disk(*args):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            whole(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr("streamchat.model.load.save", save_on_a_full_disk)
    loaded, messages = load_and_tell(fitting)
    assert stored_as(loaded) == torch.int8
    assert any(message.startswith("cannot keep the quantized weights") for message in messages)
    assert not list(models_folder.glob("*.safetensors"))


def test_a_model_that_does_not_fit(tmp_path):
    """`auto` leaves it whole and says why it is slow; who asks for int8 gets the reason."""
    folder = write_folder(tmp_path / "odd", hidden_size=80, head_dim=16)
    loaded, messages = load_and_tell(folder)
    assert stored_as(loaded) == torch.float32
    assert not any("quantizing" in message for message in messages)
    assert loaded.slow_reason
    assert "\n" not in loaded.slow_reason
    with pytest.raises(
        ModelError, match=r"'odd' cannot be quantized to int8: .* 80 inputs"
    ) as told:
        load_and_tell(folder, quantize="int8")
    assert "\n" not in str(told.value)


def test_an_unknown_scheme_is_an_error_with_the_choice(fitting):
    """A word that names none lists those that do."""
    with pytest.raises(ConfigError, match="auto, none, int8, int4, got 'int3'"):
        load_and_tell(fitting, quantize="int3")


@pytest.mark.parametrize("name", ["olmo", "phimoe"])
def test_a_model_of_odd_layers_is_quantized(name):
    """OLMo has no parameter that stays (its norms have none); PhiMoE's router is no plain layer."""
    model = family_model(name)
    quantize_model(model, "int8")
    to_dtype(model, torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model.device.type == "cpu"
    self_check(prepare(model))
