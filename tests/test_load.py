"""From a name to a model: what is found, what is refused, and that nothing half-made stays."""

import io
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import gguf as gguf_format
import numpy as np
import pytest
import sentencepiece
import torch
import transformers
from conftest import INITIALIZER_RANGE, tiny_model
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from streamchat import CacheConfig, ConfigError, ModelError, Stream, UnsupportedModelError, load
from streamchat.model import builtin, compat, gguf
from streamchat.model import load as load_module
from streamchat.model.load import end_ids
from streamchat.model.plan import Source, choose_device, choose_dtype, locate
from streamchat.model.prepare import forward

TEXT = "the quick brown fox\n"


def silent(_message):
    """Progress that nobody reads."""


@pytest.fixture
def copied(tiny_folder, tmp_path):
    """A copy of the tiny model's folder, to be broken."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "copied"))


@pytest.fixture
def models_folder(tmp_path, monkeypatch):
    """An empty folder in the place of the user's cache."""
    folder = tmp_path / "cache" / "models"
    monkeypatch.setattr(builtin, "models_folder", lambda: folder)
    return folder


def refusal(name, **options):
    """The message of the ModelError that loading `name` ends with; it must be one line."""
    with pytest.raises(ModelError) as caught:
        load(str(name), device="cpu", **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


def left_in(folder):
    """What lies in a folder, but for the empty lock files that stay by design."""
    return sorted(
        path.name for path in folder.iterdir() if path.suffix != ".lock" or path.stat().st_size
    )


# Names


def test_no_name_is_the_built_in_model(monkeypatch):
    """Without a name, `locate` asks for the built-in model and calls it by its name."""
    monkeypatch.setattr(builtin, "builtin_model", lambda progress: Path("/models/builtin"))
    assert locate(None, silent) == Source("SmolLM2-135M-Instruct", str(Path("/models/builtin")))


def test_a_folder_is_called_by_its_last_part(tiny_folder, monkeypatch):
    """A folder is found by path, relative or not, and is called by its own name."""
    assert locate(str(tiny_folder), silent) == Source("tiny-llama", str(tiny_folder))
    monkeypatch.chdir(tiny_folder)
    assert locate(".", silent).name == "tiny-llama"


def test_the_home_folder_may_be_written_as_a_tilde(tiny_folder, monkeypatch):
    """`~` stands for the home folder, also where no shell has replaced it."""
    monkeypatch.setenv("HOME", str(tiny_folder.parent))
    monkeypatch.setenv("USERPROFILE", str(tiny_folder.parent))
    assert Path(locate("~/tiny-llama", silent).path) == tiny_folder


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-0.6B", "a_b/c.d-e"])
def test_what_could_be_a_hub_id_is_left_to_the_hub(name):
    """A name of the form owner/name that is no path is taken for a Hub id."""
    assert locate(name, silent) == Source(name, name)


@pytest.mark.parametrize(
    "name", ["/no/such", "./no", "~/no", "a/b/c", "no/such.gguf", "no.gguf", "a b", "a//b"]
)
def test_a_path_that_is_not_there_is_named(name):
    """What can be no Hub id is reported as a missing file, without asking the network."""
    with pytest.raises(ModelError, match="no such model file or folder") as caught:
        locate(name, silent)
    assert name in str(caught.value)


def test_a_file_that_is_no_gguf_is_named_with_what_is_expected(tmp_path):
    """A file of another kind is refused by its name, before it is opened."""
    file = tmp_path / "model.bin"
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"model\.bin is not a \.gguf file; expected"):
        locate(str(file), silent)


def test_a_folder_without_config_says_so(tmp_path):
    """A folder that is no model names the file it lacks and what was expected."""
    assert "no config.json" in refusal(tmp_path)


# Devices, dtypes, end tokens


@pytest.mark.parametrize(
    ("cuda", "mps", "expected"),
    [(True, True, "cuda"), (True, False, "cuda"), (False, True, "mps"), (False, False, "cpu")],
)
def test_auto_takes_the_fastest_device_there_is(monkeypatch, cuda, mps, expected):
    """`auto` is CUDA, else MPS, else the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert choose_device("auto").type == expected


@pytest.mark.parametrize("name", ["cuda", "cuda:1", "mps", "meta", "xpu"])
def test_a_device_that_is_not_there_is_an_error_with_the_way_out(monkeypatch, name):
    """A device this machine lacks is named, with what works instead."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"'{name}' is not there.*--device cpu"):
        choose_device(name)


def test_a_cuda_device_with_a_number_too_high_is_an_error_too(monkeypatch):
    """`cuda:7` is as absent on a machine with one GPU as `cuda` is on one with none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(ConfigError):
        choose_device("cuda:7")


@pytest.mark.parametrize("name", ["gpu", "", "CUDA", "cuda:x"])
def test_what_is_no_device_is_an_error_with_the_choice(name):
    """A word that names no device lists the words that do."""
    with pytest.raises(ConfigError, match="auto, cpu, cuda or mps"):
        choose_device(name)


@pytest.mark.parametrize(
    ("device", "has_bfloat16", "expected"),
    [
        ("cpu", True, torch.float32),
        ("mps", True, torch.float16),
        ("cuda", True, torch.bfloat16),
        ("cuda", False, torch.float16),
    ],
)
def test_auto_dtype_is_float32_on_a_cpu_and_16_bit_elsewhere(
    monkeypatch, device, has_bfloat16, expected
):
    """On a CPU 16-bit is four times slower; on CUDA bfloat16 where the device has it."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: has_bfloat16)
    assert choose_dtype("auto", torch.device(device)) == expected


def test_a_dtype_by_name(monkeypatch):
    """The three names give the three dtypes; another is an error that lists them."""
    cpu = torch.device("cpu")
    for name in ("float32", "float16", "bfloat16"):
        assert choose_dtype(name, cpu) == getattr(torch, name)
    with pytest.raises(ConfigError, match="float32, bfloat16, float16, got 'float64'"):
        choose_dtype("float64", cpu)


@pytest.mark.parametrize(
    ("tokenizer", "config", "generation", "expected"),
    [
        (1, 2, [1, 106, 50], {1, 2, 50, 106}),
        (None, 2, None, {2}),
        (7, None, None, {7}),
        (None, [3, 4], None, {3, 4}),
        (None, None, 0, {0}),
        (None, None, None, set()),
    ],
)
def test_end_tokens_are_the_union_of_what_is_named(tokenizer, config, generation, expected):
    """Tokenizer, configuration and generation configuration each add theirs."""
    model = SimpleNamespace(
        config=SimpleNamespace(eos_token_id=config),
        generation_config=SimpleNamespace(eos_token_id=generation),
    )
    assert end_ids(SimpleNamespace(eos_token_id=tokenizer), model) == expected


def test_a_model_without_generation_config_has_end_tokens_all_the_same():
    """A missing generation configuration is no error."""
    model = SimpleNamespace(config=SimpleNamespace(eos_token_id=2))
    assert end_ids(SimpleNamespace(eos_token_id=None), model) == {2}


# transformers' versions


@pytest.mark.parametrize("version", ["4.57.1", "5.16.9", "6.0.0", "6.0.0rc1"])
def test_an_untested_transformers_is_refused_with_both_versions(monkeypatch, version, tiny_folder):
    """Outside the tested range nothing is loaded; the message says what to install."""
    monkeypatch.setattr(transformers, "__version__", version)
    message = refusal(tiny_folder)
    assert f"transformers {version} is installed" in message
    assert "pip install 'transformers>=5.17,<6'" in message


@pytest.mark.parametrize("version", ["5.17.0", "5.24.0", "5.99.1"])
def test_the_tested_range_is_accepted(monkeypatch, version):
    """The oldest declared version and the newest below the next major one pass."""
    monkeypatch.setattr(transformers, "__version__", version)
    compat.check_version()


def test_the_cache_is_handed_over_under_the_name_that_the_model_takes():
    """5.24 models take `cache`, 5.17 models `past_key_values`; both are understood."""

    def newer(ids, cache=None, past_key_values=None):
        """As in 5.24."""

    def older(ids, past_key_values=None):
        """As in 5.17."""

    assert compat.cache_argument(newer) == "cache"
    assert compat.cache_argument(older) == "past_key_values"
    mark = object()
    assert compat.cache_of({"cache": mark, "past_key_values": None}) is mark
    assert compat.cache_of({"past_key_values": mark}) is mark
    assert compat.cache_of({}) is None


# Folders


def test_a_folder_loads_and_streams(tiny_folder):
    """What `load` returns streams, and gives the numbers of the same weights loaded by hand."""
    steps = []
    loaded = load(str(tiny_folder), device="cpu", quantize="none", progress=steps.append)
    assert steps == ["loading tiny-llama", "checking that it streams exactly"]
    assert loaded.source.name == "tiny-llama"
    assert loaded.end_ids == {2}
    assert loaded.model.dtype == torch.float32
    assert not loaded.model.training
    ids = loaded.tokenizer.encode(TEXT)
    scores = Stream(loaded).score(ids)
    stock = LlamaForCausalLM.from_pretrained(tiny_folder)
    with torch.no_grad():
        log_probabilities = stock(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [-float(log_probabilities[i, token]) for i, token in enumerate(ids[1:])]
    assert scores[0] is None
    assert scores[1:] == pytest.approx(expected, rel=1e-4)


def test_the_dtype_reaches_the_weights_and_the_cache(tiny_folder):
    """`dtype` is what weights are loaded in and keys are kept in."""
    loaded = load(str(tiny_folder), device="cpu", dtype="bfloat16")
    assert loaded.model.dtype == torch.bfloat16
    assert Stream(loaded).cache.geometry.dtype == torch.bfloat16


@pytest.mark.parametrize("check", [True, False])
def test_the_self_check_runs_unless_told_otherwise(tiny_folder, monkeypatch, check):
    """`check=False` loads without the check, and only then."""
    checked = []
    monkeypatch.setattr(load_module, "self_check", checked.append)
    loaded = load(str(tiny_folder), device="cpu", check=check)
    assert checked == ([loaded.model] if check else [])


def test_a_model_is_judged_before_its_weights_are_read(copied):
    """A refusal for family or size comes from the configuration: there are no weights here."""
    (copied / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match="largest --window is 4092"):
        load(str(copied), device="cpu", cache_config=CacheConfig(window_size=4093))
    config = (copied / "config.json").read_text(encoding="utf-8")
    (copied / "config.json").write_text(config.replace('"llama"', '"gpt2"'), encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        load(str(copied), device="cpu")


def test_a_folder_without_weights_is_one_line(copied):
    """The missing file is named."""
    (copied / "model.safetensors").unlink()
    assert "model.safetensors" in refusal(copied)


def test_weights_that_execute_code_when_read_are_never_read(copied):
    """A pickle in the place of safetensors is not opened: it would run what it holds."""
    (copied / "model.safetensors").unlink()
    marker = copied / "executed"

    class Trap:
        def __reduce__(self):
            return (Path.touch, (marker,))

    torch.save({"trap": Trap()}, copied / "pytorch_model.bin")
    assert "model.safetensors" in refusal(copied)
    assert not marker.exists()


@pytest.mark.parametrize("kept_bytes", [0, 4, 1000, -1000])
def test_broken_weights_are_one_line(copied, kept_bytes):
    """A weights file cut anywhere is an error with the model's name, not a traceback."""
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept_bytes])
    assert "cannot load model 'copied'" in refusal(copied)


def test_a_weight_that_is_missing_is_refused(copied):
    """A weight that the file does not hold is not made up."""
    weights = load_file(copied / "model.safetensors")
    del weights["model.layers.0.self_attn.q_proj.weight"]
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    assert "q_proj" in refusal(copied)


def test_weights_of_another_shape_are_one_line(copied):
    """A weight of the wrong shape is refused."""
    weights = load_file(copied / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(3)
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    assert "cannot load model 'copied'" in refusal(copied)


def test_a_broken_config_is_one_line(copied):
    """A configuration that is no JSON is named."""
    (copied / "config.json").write_text("{", encoding="utf-8")
    assert "config" in refusal(copied)


def test_a_folder_without_tokenizer_is_one_line(copied):
    """A missing tokenizer is an error at load, not at the first line of input."""
    for file in copied.glob("tokenizer*"):
        file.unlink()
    assert "tokenizer" in refusal(copied)


def test_code_of_the_model_is_refused_without_a_question(copied, monkeypatch):
    """A folder that wants its own code run is refused, names the flag, and nobody is asked."""

    def asked(*args):
        raise AssertionError("the loader asked a question")

    monkeypatch.setattr("builtins.input", asked)
    marker = copied / "executed"
    (copied / "code.py").write_text(f"open({str(marker)!r}, 'w')\n", encoding="utf-8")
    config = (copied / "config.json").read_text(encoding="utf-8")
    config = config.replace('"llama"', '"own"').replace(
        "{", '{"auto_map": {"AutoConfig": "code.OwnConfig"},', 1
    )
    (copied / "config.json").write_text(config, encoding="utf-8")
    assert "--trust-remote-code" in refusal(copied)
    assert not marker.exists()


# A folder with a SentencePiece tokenizer only

SENTENCES = ["the quick brown fox jumps over the lazy dog", "a line of text", "who are you"]


@pytest.fixture(scope="module")
def sentencepiece_folder(tmp_path_factory):
    """Config, weights and `tokenizer.model`, as in the first Llama folders; nothing else."""
    folder = tmp_path_factory.mktemp("sentencepiece") / "tiny"
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 30),
        model_writer=trained,
        model_type="bpe",
        vocab_size=320,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    tiny_model(vocab_size=320).save_pretrained(folder)
    (folder / "tokenizer.model").write_bytes(trained.getvalue())
    (folder / "generation_config.json").unlink()
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.model",
    ]
    return folder


def test_a_folder_with_a_sentencepiece_model_only_streams(sentencepiece_folder):
    """It loads, and its ids are those that SentencePiece itself gives, line ends included."""
    loaded = load(str(sentencepiece_folder), device="cpu")
    reference = sentencepiece.SentencePieceProcessor(
        model_file=str(sentencepiece_folder / "tokenizer.model")
    )
    for text in (TEXT, "naïve 我\n", "a  b", " a"):
        assert loaded.tokenizer.encode(text) == reference.encode(text)
        assert loaded.tokenizer.decode(loaded.tokenizer.encode(text)) == text
    scores = Stream(loaded).score(loaded.tokenizer.encode(TEXT))
    assert all(score > 0 for score in scores[1:])


def test_the_rest_of_a_line_gets_no_space_in_front(sentencepiece_folder):
    """A text cut in two has the same text again, without a space where it was cut."""
    tokenizer = load(str(sentencepiece_folder), device="cpu").tokenizer
    whole = tokenizer.encode("the qu") + tokenizer.encode_continuation("ick brown")
    assert tokenizer.decode(whole) == "the quick brown"


# GGUF files

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}

SPECIAL_TOKENS = ["<pad>", "<s>", "</s>"]
TOKENS = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "ic"]


def write_gguf(path, model):
    """Write a Llama as llama.cpp's converter does: interleaved rotary rows, byte-level BPE."""
    config, writer = model.config, gguf_format.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    special = [gguf_format.TokenType.CONTROL] * len(SPECIAL_TOKENS)
    writer.add_token_types(special + [gguf_format.TokenType.NORMAL] * (len(TOKENS) - len(special)))
    writer.add_token_merges(["t h", "i c"])  # older transformers stumble on a list of one
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        values = tensor.numpy()
        if module.endswith(("q_proj", "k_proj")):
            is_query = module.endswith("q_proj")
            num_heads = config.num_attention_heads if is_query else config.num_key_value_heads
            rows, columns = values.shape
            halves = values.reshape(num_heads, 2, rows // num_heads // 2, columns)
            values = halves.swapaxes(1, 2).reshape(rows, columns)
        if module.startswith("model.layers."):
            _, _, index, part = module.split(".", 3)
            target = f"blk.{index}.{GGUF_NAMES[part]}.weight"
        else:
            target = f"{GGUF_NAMES[module]}.weight"
        writer.add_tensor(target, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def gguf_model():
    """The model that the .gguf file holds."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=INITIALIZER_RANGE,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def tiny_gguf(tmp_path, gguf_model):
    """A small .gguf file with the Llama architecture."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, gguf_model)
    return path


def test_a_gguf_file_gives_the_numbers_of_the_model_it_was_written_from(
    tiny_gguf, gguf_model, models_folder
):
    """Weights, rotary layout, tokenizer, length and end token all survive the conversion."""
    loaded = load(str(tiny_gguf), device="cpu", quantize="none")
    assert loaded.source.name == "tiny"
    assert loaded.end_ids == {loaded.tokenizer.inner.eos_token_id} == {2}
    assert loaded.model.config.max_position_embeddings == 512
    ids = loaded.tokenizer.encode(TEXT)
    assert ids[0] == TOKENS.index("th")
    assert loaded.tokenizer.decode(ids) == TEXT
    cache = Stream(loaded).cache
    with torch.no_grad():
        expected = gguf_model(torch.tensor([ids])).logits
    got = forward(loaded.model, torch.tensor([ids]), cache, len(ids))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_what_a_reader_stumbles_on_is_one_line(tiny_gguf, models_folder, monkeypatch):
    """However many lines the error has."""

    def stumble(*_args, **_kwargs):
        raise TypeError("failed to extract\n- variant one\n- variant two")

    monkeypatch.setattr(gguf.AutoTokenizer, "from_pretrained", stumble)
    message = refusal(tiny_gguf)
    assert message.endswith("TypeError: failed to extract - variant one - variant two")


def test_a_gguf_file_is_converted_once(tiny_gguf, models_folder):
    """The second load takes the folder that the first one made, and touches nothing in it."""
    steps = []
    load(str(tiny_gguf), device="cpu", quantize="none", progress=steps.append)
    assert steps[0] == "converting tiny.gguf (once)"
    [folder] = left_in(models_folder)
    before = {file: file.stat().st_mtime_ns for file in (models_folder / folder).iterdir()}
    steps.clear()
    load(str(tiny_gguf), device="cpu", quantize="none", progress=steps.append)
    assert "converting tiny.gguf (once)" not in steps
    assert left_in(models_folder) == [folder]
    assert {file: file.stat().st_mtime_ns for file in (models_folder / folder).iterdir()} == before


def test_a_gguf_file_that_expands_beyond_memory_is_refused(tiny_gguf, models_folder, monkeypatch):
    """By its list of tensors, in one line with both sizes; nothing is converted."""
    num_weights = sum(t.n_elements for t in gguf_format.GGUFReader(tiny_gguf).tensors)
    monkeypatch.setattr(gguf, "passing_bytes", lambda: 4 * num_weights - 1)
    message = refusal(tiny_gguf)
    assert "tiny.gguf (0.00 GB) is expanded to 0.00 GB of float32 weights" in message
    assert "--dtype bfloat16" in message
    assert left_in(models_folder) == []
    monkeypatch.setattr(gguf, "passing_bytes", lambda: 4 * num_weights)
    load(str(tiny_gguf), device="cpu", quantize="none")


def test_a_gguf_file_that_changed_is_converted_anew(tiny_gguf, models_folder):
    """The folder is named for path, size and time of the file: a new file makes a new folder."""
    first = gguf.converted_folder(tiny_gguf, models_folder)
    assert gguf.converted_folder(tiny_gguf, models_folder) == first
    os.utime(tiny_gguf, ns=(1, 1))
    assert gguf.converted_folder(tiny_gguf, models_folder) != first
    other = tiny_gguf.parent / "other" / tiny_gguf.name
    other.parent.mkdir()
    shutil.copy2(tiny_gguf, other)
    assert gguf.converted_folder(other, models_folder) != gguf.converted_folder(
        tiny_gguf, models_folder
    )


@pytest.mark.parametrize("kept_bytes", [0, 4, 300, -20_000, -1])
def test_a_truncated_gguf_file_is_one_line_and_leaves_nothing(tiny_gguf, models_folder, kept_bytes):
    """Cut in its head, its tensors or its last byte: an error with its name, and no folder."""
    data = tiny_gguf.read_bytes()
    tiny_gguf.write_bytes(data[:kept_bytes])
    message = refusal(tiny_gguf)
    assert message.startswith(f"cannot read {tiny_gguf}")
    assert left_in(models_folder) == []


def test_a_file_that_only_calls_itself_gguf_is_one_line(tmp_path, models_folder):
    """Other bytes under the name .gguf are an error that says so."""
    file = tmp_path / "other.gguf"
    file.write_bytes(b"PK\x03\x04" * 1000)
    assert "GGUF" in refusal(file)
    assert left_in(models_folder) == []


def test_a_full_disk_while_converting_is_one_line(tiny_gguf, models_folder, monkeypatch):
    """What safetensors raises is no OSError: it becomes a ModelError, and no folder is left."""

    def full(*_, **__):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(gguf, "save_model", full)
    with pytest.raises(
        ModelError, match=r"cannot write the converted model to .*: .*No space left"
    ):
        load(str(tiny_gguf), device="cpu")
    assert left_in(models_folder) == []


def test_a_conversion_that_is_interrupted_leaves_nothing(tiny_gguf, models_folder, monkeypatch):
    """Ctrl-C in the middle leaves no folder, so that the next start converts again."""

    def interrupted(source, folder):
        (folder / "config.json").write_text("{}", encoding="utf-8")
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf, "write_folder", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(str(tiny_gguf), device="cpu")
    assert left_in(models_folder) == []
    monkeypatch.undo()
    monkeypatch.setattr(builtin, "models_folder", lambda: models_folder)
    load(str(tiny_gguf), device="cpu")


def test_two_conversions_at_once_do_the_work_once(tiny_gguf, models_folder, monkeypatch):
    """The second one waits for the first, and both get the same whole folder."""
    calls, folders = [], []

    def slow(source, folder):
        calls.append(folder)
        time.sleep(0.3)
        (folder / "config.json").write_text("{}", encoding="utf-8")

    monkeypatch.setattr(gguf, "write_folder", slow)
    target = gguf.converted_folder(tiny_gguf, models_folder)
    threads = [
        threading.Thread(target=lambda: folders.append(gguf.convert(tiny_gguf, target, silent)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert folders == [target] * 3
    assert left_in(models_folder) == [target.name]
    assert left_in(target) == ["config.json"]


def test_a_cache_folder_that_cannot_be_written_is_one_line(tiny_gguf, tmp_path, monkeypatch):
    """A file where the cache folder should be is reported as what cannot be written."""
    blocked = tmp_path / "blocked"
    blocked.write_text("a file", encoding="utf-8")
    monkeypatch.setattr(builtin, "models_folder", lambda: blocked / "models")
    assert f"cannot write the converted model to {blocked}" in refusal(tiny_gguf)
