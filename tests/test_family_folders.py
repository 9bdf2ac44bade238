"""A saved model of each family, from a folder and through the command line, as a user has it.

The oracle for scores is the stock model's own forward pass. It would miss what only shows after an
eviction, which `test_matrix.py` looks at.
"""

import json
import re

import pytest
import torch
import transformers
from conftest import BYTE_VOCAB_SIZE, byte_tokenizer
from families import ROWS, all_slowly, family_config, skip_without_interface
from transformers import AutoModelForCausalLM

from streamchat.model import builtin
from streamchat.model.families import FAMILIES, Family

TEXT = "some text"
BROKEN = {
    "cohere": Family(),
    "cohere2": Family(interleaved=True),
    "gpt_oss": Family(),
    "gptj": Family(),
    "glm4": Family(),
    "llama": Family(interleaved=True),
    "ministral3": Family(),
    "phi": Family(interleaved=True),
    "smollm3": Family(),
}

every_family = pytest.mark.parametrize("name", all_slowly(ROWS))


@pytest.fixture(autouse=True)
def models_folder(tmp_path, monkeypatch):
    """An empty folder in the place of the user's cache."""
    monkeypatch.setattr(builtin, "models_folder", lambda: tmp_path / "cache")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """The folder of a family's tiny model, made on first use."""
    root = tmp_path_factory.mktemp("families")

    def folder(name):
        skip_without_interface(name)
        path = root / name
        if not path.is_dir():
            torch.manual_seed(0)
            config = family_config(name)
            config.vocab_size = BYTE_VOCAB_SIZE
            AutoModelForCausalLM.from_config(config).save_pretrained(path)
            byte_tokenizer().save_pretrained(path)
        return path

    return folder


def stock_score(folder):
    """Mean nats per token of the text, by the model's own forward pass."""
    # Older releases run Gemma 2 by a fused attention that does not squeeze the scores.
    how = {"attn_implementation": "eager"} if folder.name == "gemma2" else {}
    model = AutoModelForCausalLM.from_pretrained(folder, **how).float().eval()
    ids = [byte + 3 for byte in tokens(TEXT)]
    with torch.no_grad():
        losses = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return -sum(float(losses[i, token]) for i, token in enumerate(ids[1:])) / (len(ids) - 1)


def tokens(text):
    """Ids of the byte tokenizer, less 3, with the line end."""
    return [i - 3 for i in byte_tokenizer().encode(text + "\n", add_special_tokens=False)]


@every_family
def test_a_saved_model_scores_a_line_as_the_stock_model_does(command, folder_of, name):
    """`streamchat pipe --mode score`, with its weights as they are; the self-check is passed."""
    folder = folder_of(name)
    options = ["-m", folder, "--device", "cpu", "--window", "auto", "--quantize", "none"]
    done = command("pipe", "--mode", "score", *options, stdin=f"{TEXT}\n".encode())
    assert done.code == 0, done.err
    score, _, text = done.out.rstrip("\n").split("\t")
    assert text == TEXT
    assert float(score) == pytest.approx(stock_score(folder), abs=2e-3)
    assert "checking that it streams exactly" in done.err
    sinks = "the model's own sinks" if name == "gpt_oss" else "4 pinned"
    assert re.search(rf" on cpu, {sinks} \+ [\d,]+ newest \(auto\)", done.err)


@every_family
def test_a_saved_model_streams_with_the_weights_that_a_cpu_stores(command, folder_of, name):
    """By default in int8, or as they are where they cannot be; twice, the second time as kept."""
    options = [
        "pipe",
        "--mode",
        "score",
        "-m",
        folder_of(name),
        "--device",
        "cpu",
        "--window",
        "60",
    ]
    outputs = [command(*options, stdin=f"{TEXT}\n".encode()) for _ in range(2)]
    assert [done.code for done in outputs] == [0, 0], outputs
    assert outputs[0].out == outputs[1].out


@every_family
def test_info_says_what_a_saved_model_is(command, folder_of, name):
    """Family, positions and sizes, from the folder."""
    done = command("info", folder_of(name), "--device", "cpu", "--window", "60", "--json")
    assert done.code == 0, done.err
    facts = json.loads(done.out)
    assert facts["family"] == name.split(" (")[0]
    assert facts["weight_bytes"] > 0
    assert facts["sink_size"] == (0 if name == "gpt_oss" else 4)
    assert facts["cache_bytes"] == (facts["sink_size"] + 60) * facts["bytes_per_token"] > 0
    assert facts["positions"]


@pytest.mark.parametrize("name", BROKEN)
def test_a_wrong_entry_in_the_table_is_refused_at_load(command, folder_of, monkeypatch, name):
    """The self-check stands between a mistake in `FAMILIES` and rubbish: exit 3 and one line."""
    folder = folder_of(name)
    monkeypatch.setitem(FAMILIES, name, BROKEN[name])
    options = ["pipe", "--mode", "score", "-q", "-m", folder, "--device", "cpu"]
    options += ["--window", "60", "--quantize", "none"]
    done = command(*options, stdin=b"text\n")
    assert (done.code, done.out) == (3, "")
    assert len(done.err.splitlines()) == 1
    assert "self-check failed" in done.err
    assert "--no-self-check streams it all the same, at the risk of rubbish" in done.err
    assert command(*options, "--no-self-check", stdin=b"text\n").code == 0


def test_an_exception_in_the_forward_pass_is_one_line_at_load(command, folder_of, monkeypatch):
    """Not a traceback, and not an error of ours: the model cannot be streamed."""

    def broken(*args, **kwargs):
        raise IndexError("index 7 is out of range")

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaMLP, "forward", broken)
    options = ["pipe", "--mode", "score", "-q", "-m", folder_of("llama"), "--window", "60"]
    done = command(*options, "--device", "cpu", "--quantize", "none", stdin=b"text\n")
    assert (done.code, done.out) == (3, "")
    assert len(done.err.splitlines()) == 1
    assert "self-check failed" in done.err
    assert "IndexError: index 7 is out of range" in done.err


def test_modules_that_contradict_the_configuration_are_refused(command, folder_of, monkeypatch):
    """A RoPE table longer than a head is the model's fault (3), not that of an option (2)."""
    monkeypatch.setattr(
        "streamchat.model.families._frequencies", lambda model: {"inv_freq": torch.ones(99)}
    )
    options = ["pipe", "--mode", "score", "-q", "-m", folder_of("llama"), "--window", "60"]
    done = command(*options, "--device", "cpu", stdin=b"text\n")
    assert done.code == 3
    assert "model 'llama' is refused: inv_freq must have shape" in done.err
    assert len(done.err.splitlines()) == 1


def test_the_help_says_what_no_self_check_risks(command):
    """In each command that loads a model."""
    for name in ("chat", "pipe", "bench"):
        words = " ".join(command(name, "--help").out.replace("│", " ").split())
        assert "Load without checking that the model streams exactly: what it says may be" in words
