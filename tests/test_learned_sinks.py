"""How many sinks a cache gets where nobody says: 4, or none where the model has its own.

A pinned prefix stays in any case, but for a plain window that is asked for by name.
"""

import json

import pytest
import torch
from conftest import BYTE_VOCAB_SIZE, byte_tokenizer
from families import family_config, family_model
from transformers import AutoModelForCausalLM

from streamchat import CacheConfig, SinkCache, UsageError, load, prepare
from streamchat.chat.conversation import Conversation
from streamchat.cli.options import parse_cache
from streamchat.model import builtin

SYSTEM = "Be brief."
AUTO, NONE = CacheConfig(has_auto_sinks=True), CacheConfig(sink_size=0)
LEARNED = AUTO.settle(has_learned_sinks=True)


# The decision


@pytest.mark.parametrize(
    ("sinks", "expected"),
    [("auto", AUTO), (" auto ", AUTO), ("0", NONE), ("4", CacheConfig()), ("9", None)],
)
def test_sinks_are_a_number_or_auto(sinks, expected):
    """What --sinks says, before the model is known."""
    assert parse_cache(sinks, "1020") == (expected or CacheConfig(sink_size=9))


@pytest.mark.parametrize("sinks", ["-1", "1.5", "many", "", "٤"])
def test_anything_else_is_refused_by_name(sinks):
    """With the option, what it takes, and what it got."""
    with pytest.raises(UsageError, match=r"--sinks must be auto or a number of tokens from 0 on"):
        parse_cache(sinks, "1020")


def test_only_auto_gives_way_to_learned_sinks():
    """And only where there are some."""
    assert LEARNED.sink_size == 0
    assert AUTO.settle(has_learned_sinks=False) == AUTO
    for asked in (CacheConfig(), NONE):
        assert asked.settle(has_learned_sinks=True) == asked
    assert LEARNED.settle(has_learned_sinks=True) == LEARNED


@pytest.mark.parametrize(
    ("config", "sink_size"),
    [(AUTO, 9), (LEARNED, 9), (CacheConfig(), 9), (CacheConfig(sink_size=12), 12), (NONE, 0)],
)
def test_a_prefix_is_pinned_but_for_a_plain_window(config, sink_size):
    """No sinks needed, and no sinks wanted, are two things."""
    pinned = config.pin(9)
    assert pinned.sink_size == sink_size
    assert pinned.window_size == config.window_size
    assert config.pins == (config is not NONE)


def test_an_automatic_window_gives_way_to_the_prefix():
    """The cache keeps its size, whoever chose the sinks."""
    config = parse_cache("auto", "auto").settle(has_learned_sinks=True)
    assert config.pin(9).cache_size == config.cache_size == config.window_size


def test_the_words_tell_none_needed_from_none_wanted():
    """As in the first line on standard error."""
    assert LEARNED.describe() == "the model's own sinks + 1,020 newest"
    assert LEARNED.pin(9).describe() == "9 pinned + 1,020 newest"
    assert NONE.describe() == "0 pinned + 1,020 newest"


@pytest.mark.parametrize(("family", "sink_size"), [("gpt_oss", 0), ("llama", 4)])
def test_a_cache_without_a_configuration_has_what_the_model_needs(family, sink_size):
    """`SinkCache.for_model(model)`, in Python."""
    model = prepare(family_model(family))
    assert SinkCache.for_model(model).config.sink_size == sink_size
    assert SinkCache.for_model(model, CacheConfig()).config.sink_size == 4


# Through the command line


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny GPT-OSS with the byte tokenizer."""
    path = tmp_path_factory.mktemp("models") / "gpt_oss"
    torch.manual_seed(0)
    config = family_config("gpt_oss")
    config.vocab_size, config.max_position_embeddings = BYTE_VOCAB_SIZE, 4096
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def sized(command, folder, tmp_path, monkeypatch):
    """A command on that model, with a window of 60; takes its name and more options."""
    monkeypatch.setattr(builtin, "models_folder", lambda: tmp_path)

    def call(name, *more, stdin=b"text\n"):
        options = ["-m", folder, "--device", "cpu", "--window", "60", "--quantize", "none"]
        done = command(name, *options, *more, stdin=stdin)
        assert done.code == 0, done.err
        return done

    return call


def test_scores_are_taken_without_sinks(sized, monkeypatch):
    """Unless some are asked for, as an option or in the environment."""
    done = sized("pipe", "--mode", "score")
    assert "gpt_oss on cpu, the model's own sinks + 60 newest\n" in done.err
    assert "cpu, 4 pinned + 60" in sized("pipe", "--mode", "score", "--sinks", "4").err
    monkeypatch.setenv("STREAMCHAT_SINKS", "2")
    assert "cpu, 2 pinned + 60" in sized("pipe", "--mode", "score").err
    assert "own sinks + 60" in sized("pipe", "--mode", "score", "--sinks", "auto").err


def test_a_chat_pins_its_system_prompt_and_nothing_else(sized, folder):
    """As many sinks as ids before the first question, none for a plain window."""
    loaded = load(str(folder), device="cpu", quantize="none")
    pinned = Conversation(loaded, system=SYSTEM, cache=LEARNED).num_pinned
    assert pinned > len(SYSTEM)
    chat = ("chat", "-s", SYSTEM, "--max-new", "2", "--no-log")
    assert f"cpu, {pinned} pinned + 60 newest; not logged\n" in sized(*chat).err
    assert "0 pinned + 60 newest; no sinks: the system prompt leaves" in (
        sized(*chat, "--sinks", "0").err
    )
    reply = ("pipe", "--mode", "reply", "--prompt", SYSTEM, "--max-new", "2")
    assert f"cpu, {pinned} pinned + 60 newest\n" in sized(*reply).err


def test_a_conversation_by_default_has_what_the_model_needs(folder):
    """In Python, without a configuration: the prefix alone, be it shorter than four sinks."""
    loaded = load(str(folder), device="cpu", quantize="none")
    conversation = Conversation(loaded, system=SYSTEM, cache=None)
    assert conversation.cache_config == LEARNED.pin(conversation.num_pinned)


def test_info_says_whose_the_sinks_are(sized):
    """In words, and as a number."""
    words = "sink size        0 (the model has sinks of its own; a system prompt is pinned all the"
    assert words in sized("info").out
    assert json.loads(sized("info", "--json").out)["sink_size"] == 0
    assert "sink size        4\n" in sized("info", "--sinks", "4").out
    assert "sink size        0\n" in sized("info", "--sinks", "0").out


def test_other_models_keep_four(command, tiny_folder):
    """Auto is what the default was."""
    done = command("info", tiny_folder, "--device", "cpu", "--json")
    assert json.loads(done.out)["sink_size"] == 4
