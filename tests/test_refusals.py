"""Models that cannot be streamed, through the command line: exit 3, one true line, nothing read.

Each folder holds a configuration and no weights, so what is refused is refused before these. The
input begins with "y", as an answer that a loader might ask for.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from test_cli import ENVIRONMENT, PROGRAM, START_SECONDS, assert_one_line, posix_only

from streamchat.cli.app import run

pytestmark = pytest.mark.usefixtures("undisturbed")

INPUT = b"y\nhello\n"

STATE = "state-space or linear-attention layers, which keep no keys to evict"
LATENT = "latent attention (MLA), whose cache holds no keys that could be re-placed"
MROPE = "multimodal positions (M-RoPE), which are not one stream"
ENCODER_DECODER = "an encoder-decoder, and streamchat streams decoder-only models"
LEARNED = "positions are learned and absolute"

# By configuration class: its fields beside the defaults, and the reason.
REFUSED = {
    "Mamba": ({}, STATE),
    "Mamba2": ({}, STATE),
    "FalconMamba": ({}, STATE),
    "Jamba": ({}, STATE),
    "Bamba": ({}, STATE),
    "Zamba2": ({}, STATE),
    "FalconH1": ({}, STATE),
    "Qwen3Next": ({}, STATE),
    "NemotronH": ({}, STATE),
    "GraniteMoeHybrid": ({}, STATE),
    "MiniMax": ({}, STATE),
    "RecurrentGemma": ({}, STATE),
    "Rwkv": ({}, STATE),
    "xLSTM": ({}, STATE),
    "Lfm2": ({}, "convolution layers, which keep no keys to evict"),
    "DeepseekV2": ({}, LATENT),
    "DeepseekV3": ({}, LATENT),
    "Qwen2VL": ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, MROPE),
    "Qwen2_5_VL": ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, MROPE),
    "T5": ({}, ENCODER_DECODER),
    "Bart": ({}, ENCODER_DECODER),
    "Whisper": ({}, ENCODER_DECODER),
    "GPT2": ({"n_positions": 32}, f"{LEARNED} (n_positions is 32)"),
    "GPTBigCode": ({"n_positions": 32}, f"{LEARNED} (n_positions is 32)"),
    "OPT": ({"max_position_embeddings": 32}, f"{LEARNED} (max_position_embeddings is 32)"),
}


@pytest.fixture
def folder_of(tmp_path):
    """A folder with the configuration of a class in transformers, and nothing else."""

    def make(name, **fields):
        getattr(transformers, f"{name}Config")(**fields).save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return make


@pytest.fixture
def refused(capfd, monkeypatch, tmp_path):
    """Run a command on INPUT; gives its one line, after looking that the input was not touched."""

    def asked(*args):
        raise AssertionError("the loader asked a question")

    def call(*args):
        monkeypatch.setattr("builtins.input", asked)
        source = tmp_path / "stdin"
        source.write_bytes(INPUT)
        capfd.readouterr()
        with source.open("rb") as file:
            monkeypatch.setattr(sys, "stdin", file)
            code = run([str(arg) for arg in args])
            assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == 0
        out, err = capfd.readouterr()
        assert (code, out) == (3, "")
        assert_one_line(err)
        return err

    return call


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_keeps_no_placeable_keys_is_refused_by_name(folder_of, refused, name):
    """State spaces, hybrids, latent attention, M-RoPE, encoder-decoders, learned positions.

    Streaming one of these would print rubbish, or end in an index error after some tokens.
    """
    fields, reason = REFUSED[name]
    folder = folder_of(name, **fields)
    family = transformers.AutoConfig.from_pretrained(folder).model_type
    err = refused("pipe", "-q", "-m", folder)
    assert f"model family '{family}' is refused: it" in err
    assert reason in err


COMMANDS = [
    ["pipe", "--mode", "score"],
    ["pipe", "--mode", "reply"],
    ["pipe"],
    ["chat"],
    ["chat", "-s", "You are brief."],
    ["bench"],
]
each_command = pytest.mark.parametrize("command", COMMANDS, ids=" ".join)


@each_command
def test_every_command_refuses_such_a_model(folder_of, refused, command):
    """It is not left to the mode: whatever would load a Mamba ends the same way."""
    assert STATE in refused(*command, "-q", "-m", folder_of("Mamba"))


@each_command
def test_sinks_and_window_above_the_trained_length_name_the_largest_window(
    folder_of, refused, command
):
    """By every command, from the configuration: 4 sinks leave 60 of 64 tokens for the window."""
    folder = folder_of("Llama", max_position_embeddings=64)
    err = refused(*command, "-q", "-m", folder, "--window", "61")
    assert "sinks 4 + window 61 = 65 is above the 64 tokens the model was trained for" in err
    assert "the largest --window is 60" in err


def test_a_native_window_in_every_layer_bounds_sinks_and_window(folder_of, refused):
    """As in the first Mistral: what lies beyond its window of 8 was never seen by any layer."""
    folder = folder_of("Mistral", sliding_window=8)
    err = refused("pipe", "-q", "-m", folder, "--window", "5")
    assert "is above the 8 tokens" in err
    assert "the largest --window is 4" in err


@posix_only
def test_the_real_program_refuses_and_ends(folder_of):
    """A hybrid whose input is piped in: the process ends by itself, with one line."""
    folder = folder_of("Jamba")
    done = subprocess.run(
        [*PROGRAM, "pipe", "-q", "--model", str(folder)],
        input=INPUT,
        capture_output=True,
        env=ENVIRONMENT,
        timeout=START_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, b"")
    assert_one_line(done.stderr.decode())
    assert STATE in done.stderr.decode()
    assert sorted(path.name for path in Path(folder).iterdir()) == ["config.json"]
