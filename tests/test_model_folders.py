"""Tokenizers, templates and end tokens as model folders have them, loaded as a user loads them.

Oracles: SentencePiece itself for its own files, and counting by hand with one id for each byte.
"""

import io
import json
import shutil
import subprocess

import pytest
import sentencepiece
import torch
from conftest import BYTE_VOCAB_SIZE, CHATML, byte_tokenizer, tiny_model
from families import NATIVE_WINDOW, family_config
from test_cli import ENVIRONMENT, PROGRAM, START_SECONDS
from test_template import GEMMA2
from test_tokenizer import byte_tokenizer_with
from tokenizers import AddedToken
from transformers import ByT5Tokenizer, GenerationConfig

from streamchat import CacheConfig, Stream, load
from streamchat.chat.conversation import Conversation
from streamchat.events import TextDelta
from streamchat.model import builtin

SCORE = ["pipe", "--mode", "score"]
ON_CPU = ["--device", "cpu", "--quantize", "none", "--window", "60"]


@pytest.fixture(autouse=True)
def models_folder(tmp_path, monkeypatch):
    """An empty folder in the place of the user's cache."""
    monkeypatch.setattr(builtin, "models_folder", lambda: tmp_path / "cache")


def save(folder, tokenizer, **config):
    """A folder with a tiny model; a tokenizer's own bytes are written as its SentencePiece file."""
    tiny_model(**config).save_pretrained(folder)
    if isinstance(tokenizer, bytes):
        (folder / "tokenizer.model").write_bytes(tokenizer)
        (folder / "generation_config.json").unlink()
    else:
        tokenizer.save_pretrained(folder)
    return folder


def load_tiny(folder):
    return load(str(folder), device="cpu", quantize="none", check=False)


def refused(command, folder, *args, stdin=b"y\nhello\n"):
    """The one line with which a command ends."""
    done = command(*(args or SCORE), "-q", "-m", folder, *ON_CPU, stdin=stdin)
    assert (done.code, done.out) == (3, "")
    assert len(done.err.splitlines()) == 1
    return done.err


def positions(done):
    """Stream position of each scored line."""
    assert done.code == 0, done.err
    return [json.loads(line)["position"] for line in done.out.splitlines()[1:-1]]


# SentencePiece alone: is there a BOS?

SENTENCES = ["the quick brown fox jumps over the lazy dog", "a line of text", "who are you"] * 30
LLAMA_2 = {"bos_id": 1, "eos_id": 2, "unk_id": 0}
GEMMA = {
    "bos_id": 2,
    "bos_piece": "<bos>",
    "eos_id": 1,
    "eos_piece": "<eos>",
    "pad_id": 0,
    "pad_piece": "<pad>",
    "unk_id": 3,
    "add_dummy_prefix": False,
}


def sentencepiece_file(**options):
    """A trained model, as the bytes of its file; with byte fallback, and spaces as they are."""
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=trained,
        model_type="bpe",
        vocab_size=320,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
    )
    return trained.getvalue()


def sentencepiece_folder(folder, options, statement=None, **config):
    """A folder with `tokenizer.model`, and `tokenizer_config.json` where there is a statement."""
    save(folder, sentencepiece_file(**options), vocab_size=320, **config)
    if statement is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(statement), encoding="utf-8")
    return folder


BOS = [
    (LLAMA_2, None, {}, [1]),
    (LLAMA_2, {"tokenizer_class": "LlamaTokenizer"}, {}, [1]),
    (LLAMA_2, {"add_bos_token": True}, {}, [1]),
    (LLAMA_2, {"add_bos_token": False}, {}, []),
    (LLAMA_2, {"add_bos_token": False, "tokenizer_class": "LlamaTokenizer"}, {}, []),
    (LLAMA_2, None, {"bos_token_id": 7}, []),
    (LLAMA_2, None, {"bos_token_id": None}, []),
    ({"bos_id": -1, "eos_id": 1, "unk_id": 0}, None, {"eos_token_id": 1}, []),
    (GEMMA, {"tokenizer_class": "GemmaTokenizer"}, {"bos_token_id": 2, "eos_token_id": 1}, [2]),
]


@pytest.mark.parametrize(("options", "statement", "config", "expected"), BOS, ids=range(len(BOS)))
def test_bos_of_a_folder_with_a_sentencepiece_file_only(
    command, tmp_path, options, statement, config, expected
):
    """Nothing says whether BOS is added: it is, where the file and config.json agree on its id.

    A statement in tokenizer_config.json decides, and without agreement there is none. Where there
    is one it stands at position 0, once, in scores of several lines and in a chat of five turns.
    """
    folder = sentencepiece_folder(tmp_path / "model", options, statement, **config)
    loaded = load_tiny(folder)
    assert loaded.tokenizer.bos_ids() == expected
    done = command(*SCORE, "--json", "-q", "-m", folder, *ON_CPU, stdin=b"a line\nwho\n")
    assert positions(done)[0] == len(expected)
    conversation = Conversation(
        loaded, system="Be brief.", cache=CacheConfig(window_size=400), max_new_tokens=4
    )
    fed = list(conversation.template.first_turn("one"))
    for _ in range(4):
        fed += conversation.template.next_turn("who are you")
    assert fed[: len(expected)] == expected
    assert sum(token in (loaded.tokenizer.inner.bos_token_id, 1, 2) for token in fed) == len(
        expected
    )


@pytest.mark.parametrize("options", [LLAMA_2, GEMMA], ids=["space in front", "none"])
@pytest.mark.parametrize("name", [None, "LlamaTokenizer"])
def test_a_sentencepiece_file_is_read_as_sentencepiece_reads_it(tmp_path, options, name):
    """The same ids and the text again: spaces in front, doubled, and bytes that no piece has."""
    statement = None if name is None else {"tokenizer_class": name}
    folder = sentencepiece_folder(tmp_path / "model", options, statement)
    tokenizer = load_tiny(folder).tokenizer
    reference = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    for text in ("the quick", " a", "   a", "a  b", "naïve 我 👩‍👩‍👧\n", "\n x", "x , y 's ."):
        assert tokenizer.encode(text) == reference.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_tokenizer_json_is_taken_at_its_word(tmp_path):
    """Where there is one, what it puts before a text is all that is; `tokenizer.model` or not."""
    folder = sentencepiece_folder(tmp_path / "model", LLAMA_2)
    without = load_tiny(folder).tokenizer.inner
    without.add_bos_token = False
    without.save_pretrained(folder)
    (folder / "tokenizer.model").write_bytes(sentencepiece_file(**LLAMA_2))
    assert load_tiny(folder).tokenizer.bos_ids() == []


def test_two_ids_before_a_text_both_open_the_stream(command, tmp_path):
    """As GLM's `[gMASK]<sop>`: both are fed, in order, once."""
    inner = byte_tokenizer_with("<|im_end|> <|im_start|> $A")
    folder = save(tmp_path / "model", inner, vocab_size=BYTE_VOCAB_SIZE)
    assert load_tiny(folder).tokenizer.bos_ids() == [2, 1]
    done = command(*SCORE, "--json", "-q", "-m", folder, *ON_CPU, stdin=b"ab\ncd\n")
    assert positions(done) == [2, 5]


# Slow tokenizers, and vocabularies that are not of the embedding's size


@pytest.fixture
def slow_folder(tmp_path):
    """A tokenizer in Python with 384 ids (a byte is its value + 3), and an embedding of 400."""
    return save(tmp_path / "slow", ByT5Tokenizer(), vocab_size=400)


def test_a_slow_tokenizer_streams(command, slow_folder):
    """A tokenizer without a fast version: ids counted by hand, typed special tokens stay text."""
    text = "naïve 我 </s><pad>"
    tokenizer = load_tiny(slow_folder).tokenizer
    assert not tokenizer.inner.is_fast
    assert tokenizer.encode(text) == [byte + 3 for byte in text.encode()]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    done = command(*SCORE, "--json", "-q", "-m", slow_folder, *ON_CPU, stdin=f"{text}\n\n".encode())
    assert positions(done) == [0, len(text.encode()) + 1]
    done = command("chat", "-q", "-m", slow_folder, *ON_CPU, "--max-new", "5", stdin=b"Hi\n")
    assert done.code == 0, done.err


def favour(model, ids):
    """Let the model find these ids by far the most likely."""

    def add(_module, _args, logits):
        logits[..., ids] += 1e4

    model.lm_head.register_forward_hook(add)


@pytest.mark.parametrize("kind", ["slow", "fast"])
def test_an_id_without_a_token_is_never_said(slow_folder, tmp_path, kind):
    """The embedding is larger than the tokenizer: the rows that pad it are not chosen.

    The model wants them most, and a slow tokenizer cannot even decode them.
    """
    folder, num_tokens = slow_folder, 384
    if kind == "fast":
        folder = save(tmp_path / "fast", byte_tokenizer(), vocab_size=264)
        num_tokens = BYTE_VOCAB_SIZE
    loaded = load_tiny(folder)
    rows = loaded.model.config.vocab_size
    assert loaded.unnamed_ids == frozenset(range(num_tokens, rows))
    favour(loaded.model, range(num_tokens, rows))
    stream = Stream(loaded, CacheConfig(window_size=60))
    stream.feed(loaded.tokenizer.encode("Hi"))
    assert int(stream.logits.argmax()) >= num_tokens
    events = list(stream.generate(max_new_tokens=20))
    assert max(stream.recent_ids) < num_tokens
    assert any(isinstance(event, TextDelta) for event in events)


def test_an_end_token_that_the_tokenizer_does_not_know_still_ends(tmp_path):
    """An id that only generation_config.json names may stand for no token, and must be chosen."""
    folder = save(tmp_path / "model", byte_tokenizer(), vocab_size=264)
    GenerationConfig(eos_token_id=[2, 262]).save_pretrained(folder)
    loaded = load_tiny(folder)
    favour(loaded.model, [262])
    stream = Stream(loaded, CacheConfig(window_size=60))
    stream.feed(loaded.tokenizer.encode("Hi"))
    (end,) = stream.generate(max_new_tokens=20)
    assert (end.reason, end.num_tokens) == ("end_token", 0)


def test_words_without_an_embedding_are_refused_before_weights_are_read(command, tmp_path):
    """The tokenizer of another model: a text could ask for ids that are not there."""
    folder = save(tmp_path / "model", byte_tokenizer(), vocab_size=200)
    (folder / "model.safetensors").unlink()
    err = refused(command, folder)
    assert "and its tokenizer do not belong together" in err
    assert "the tokenizer has ids up to 258, the model's embedding 200 rows" in err


@pytest.mark.parametrize("special", [True, False])
def test_an_added_token_without_an_embedding_stays_text(command, tmp_path, special):
    """A text that says `<image>` where the model has no row for that token: letter by letter."""
    inner = byte_tokenizer()
    inner.add_tokens([AddedToken("<image>", special=special)], special_tokens=special)
    assert inner.encode("<image>", add_special_tokens=False) == [BYTE_VOCAB_SIZE]
    folder = save(tmp_path / "model", inner, vocab_size=BYTE_VOCAB_SIZE)
    text = b"an <image> here\n"
    done = command(*SCORE, "--json", "-q", "-m", folder, *ON_CPU, stdin=2 * text)
    assert positions(done) == [0, len(text)]


def test_a_bos_without_an_embedding_is_refused(command, tmp_path):
    """It would be the first id of every stream."""
    inner = byte_tokenizer_with("<|im_start|> $A")
    inner.add_tokens([AddedToken("<start>", special=True)], special_tokens=True)
    processor = inner.backend_tokenizer
    processor.post_processor = type(processor.post_processor)(
        single="<start> $A", special_tokens=[("<start>", BYTE_VOCAB_SIZE)]
    )
    folder = save(tmp_path / "model", inner, vocab_size=BYTE_VOCAB_SIZE)
    assert "its tokenizer begins a text with '<start>', id 259" in refused(command, folder)


def test_a_template_that_writes_tokens_without_an_embedding_is_refused(command, tmp_path):
    """A chat template beside a model without its markers: no chat, but scores all the same."""
    inner = byte_tokenizer()
    inner.add_tokens([AddedToken("<|turn|>", special=True)], special_tokens=True)
    inner.chat_template = CHATML.replace("<|im_end|>", "<|turn|>")
    folder = save(tmp_path / "model", inner, vocab_size=BYTE_VOCAB_SIZE)
    for args in (["chat"], ["pipe"], ["pipe", "--mode", "reply"]):
        err = refused(command, folder, *args)
        assert "its chat template writes '<|turn|>', id 259" in err
        assert "the model's embedding has 259 rows" in err
    assert command(*SCORE, "-q", "-m", folder, *ON_CPU, stdin=b"a\n").code == 0


# End tokens


def end_token_folder(folder, of_tokenizer, of_config, of_generation_config):
    """A folder in which each of three files names end tokens, or does not."""
    inner = byte_tokenizer()
    inner.eos_token = of_tokenizer
    save(folder, inner, vocab_size=BYTE_VOCAB_SIZE, eos_token_id=of_config)
    (folder / "generation_config.json").unlink()
    if of_generation_config is not None:
        GenerationConfig(eos_token_id=of_generation_config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("of_tokenizer", "of_config", "of_generation_config", "expected"),
    [
        ("<|im_start|>", None, [1, 106, 50], {1, 50, 106}),
        ("<|im_end|>", 7, [106, 50], {2, 7, 50, 106}),
        (None, [7, 8], None, {7, 8}),
        ("<|im_end|>", None, None, {2}),
    ],
)
def test_end_tokens_of_a_folder_are_the_union_of_its_files(
    tmp_path, of_tokenizer, of_config, of_generation_config, expected
):
    """The tokenizer's files, config.json, generation_config.json: an answer ends at any of them."""
    folder = end_token_folder(tmp_path / "model", of_tokenizer, of_config, of_generation_config)
    loaded = load_tiny(folder)
    assert loaded.end_ids == expected
    for end in expected:
        stream = Stream(loaded, CacheConfig(window_size=60))
        stream.feed(loaded.tokenizer.encode("Hi"))
        stream.logits = torch.zeros_like(stream.logits)
        stream.logits[end] = 1e4
        (event,) = stream.generate(max_new_tokens=20)
        assert event.reason == "end_token"


@pytest.mark.parametrize("args", [["chat"], ["pipe", "--mode", "reply"]], ids=" ".join)
def test_without_any_end_token_there_is_a_warning_and_the_cap(command, tmp_path, args):
    """No file names one: standard error says so, and an answer has --max-new tokens."""
    folder = end_token_folder(tmp_path / "model", None, None, None)
    options = ["-m", folder, *ON_CPU, "--max-new", "7", "--temperature", "0"]
    done = command(*args, *options, stdin=b"Hi\n")
    assert done.code == 0, done.err
    assert "it names no end token: answers end at --max-new" in done.err
    named = end_token_folder(tmp_path / "named", "<|im_end|>", None, None)
    assert "end token" not in command(*args, "-m", named, *options[2:], stdin=b"Hi\n").err


# Templates


def test_a_template_without_a_system_role_chats_with_a_system_prompt(command, tmp_path):
    """It refuses a system message: said once on standard error, and two turns are answered."""
    inner = byte_tokenizer()
    inner.chat_template = GEMMA2
    folder = save(tmp_path / "model", inner, vocab_size=BYTE_VOCAB_SIZE)
    options = ["-m", folder, *ON_CPU, "--window", "400", "--max-new", "3", "--temperature", "0"]
    done = command("chat", "-s", "Be brief.", *options, stdin=b"One?\nTwo?\n")
    assert done.code == 0, done.err
    note = "the template has no system role: the system prompt opens the first turn"
    assert done.err.count(note) == 1
    assert note not in command("chat", *options, stdin=b"One?\n").err


def test_a_model_without_a_template_chats_in_the_plain_format(command, tmp_path):
    """A base model: two turns, with a system prompt and without, and a line that says how."""
    inner = byte_tokenizer()
    inner.chat_template = None
    folder = save(tmp_path / "model", inner, vocab_size=BYTE_VOCAB_SIZE)
    options = ["-m", folder, *ON_CPU, "--max-new", "3", "--temperature", "0"]
    for system in ([], ["-s", "Be brief."]):
        done = command("chat", *system, *options, stdin=b"One?\nTwo?\n")
        assert done.code == 0, done.err
        assert done.err.count("no chat template: plain User/Assistant") == 1


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('never') }}", "{% broken", "{{ messages[0].content }}"]
)
def test_a_template_of_no_use_ends_a_chat_in_one_line(command, tmp_path, template):
    """It raises, does not parse, or drops the history: never a traceback of jinja's."""
    inner = byte_tokenizer()
    inner.chat_template = template
    folder = save(tmp_path / "model", inner, vocab_size=BYTE_VOCAB_SIZE)
    err = refused(command, folder, "chat")
    assert "the model's chat template cannot be used" in err


def test_a_folder_without_its_sentencepiece_file_names_no_other_library(command, tmp_path):
    """No tokenizer at all is one line about the model, without a traceback."""
    folder = sentencepiece_folder(tmp_path / "model", LLAMA_2)
    (folder / "tokenizer.model").unlink()
    assert "cannot load model" in refused(command, folder)


def test_a_broken_sentencepiece_file_is_one_line(command, tmp_path):
    """Cut short, or other bytes under its name."""
    folder = sentencepiece_folder(tmp_path / "model", LLAMA_2)
    whole = (folder / "tokenizer.model").read_bytes()
    for number, data in enumerate((b"", whole[:100], whole[:-7], b"PK\x03\x04" * 100)):
        other = shutil.copytree(folder, tmp_path / str(number))
        (other / "tokenizer.model").write_bytes(data)
        assert "cannot load model" in refused(command, other)


# Text that comes with the command line


@pytest.fixture(scope="module")
def byte_folder(tmp_path_factory):
    """A tiny model with one id for each byte."""
    return save(
        tmp_path_factory.mktemp("bytes") / "tiny", byte_tokenizer(), vocab_size=BYTE_VOCAB_SIZE
    )


BAD = "caf\udce9"
"""What Python makes of an argument in Latin-1."""


@pytest.mark.parametrize(
    "args",
    [
        ["chat", "-s", BAD],
        ["chat", "--stop", BAD],
        ["pipe", "--mode", "reply", "--prompt", BAD],
        ["pipe", "--mode", "reply", "--stop", BAD],
        ["pipe", "--prompt", BAD, "--stop", BAD],
    ],
    ids=lambda args: " ".join(args[:-1]),
)
def test_arguments_that_are_no_utf8_are_no_error(command, byte_folder, args):
    """System prompts, instructions and stop strings with bytes that make no character."""
    options = ["-q", "-m", byte_folder, *ON_CPU, "--window", "300", "--max-new", "3"]
    done = command(*args, *options, stdin=b"Hi\n")
    assert (done.code, done.err) == (0, "")


def test_a_folder_whose_name_is_no_utf8_is_one_line(command, byte_folder, tmp_path):
    """The libraries that read weights and tokenizers cannot open it: exit 3, by every way."""
    folder = tmp_path / "m\udce9"
    try:
        shutil.copytree(byte_folder, folder)
    except OSError:
        pytest.skip("file names are UTF-8 here")
    for quantize in ("none", "auto"):
        done = command(*SCORE, "-q", "-m", folder, "--quantize", quantize, "--window", "60")
        assert (done.code, done.out) == (3, "")
        assert len(done.err.splitlines()) == 1


# Warnings and progress of the libraries


def test_a_chat_with_warnings_as_errors(byte_folder, tmp_path):
    """Nothing that a library calls deprecated is used, and no bar or warning gets onto stdout."""
    warned = ENVIRONMENT | {"PYTHONWARNINGS": "error::DeprecationWarning,error::FutureWarning"}
    warned["STREAMCHAT_DATA"] = str(tmp_path / "data")
    del warned["COLUMNS"]
    options = ["-m", str(byte_folder), *ON_CPU, "--max-new", "5", "--temperature", "0"]
    done = subprocess.run(
        [*PROGRAM, "chat", *options],
        input=b"Hello\nMore\n",
        capture_output=True,
        env=warned,
        timeout=START_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"deprecat" not in (done.stdout + done.stderr).lower()
    assert all(line.startswith(b"streamchat: ") for line in done.stderr.splitlines())


# Native windows


@pytest.mark.parametrize("name", ["gemma3_text", "cohere2", "gpt_oss", "exaone4"])
def test_info_says_which_layers_have_a_native_window(command, tmp_path, name):
    """One of two layers, 8 tokens: both numbers are in the line on positions."""
    family_config(name).save_pretrained(tmp_path / "model")
    done = command("info", tmp_path / "model", *ON_CPU[:2], "--window", "60", "--json")
    positions = json.loads(done.out)["positions"]
    assert f"a native window of {NATIVE_WINDOW} in 1 of 2 layers" in positions
