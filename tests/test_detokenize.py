"""Ids to text one at a time: joined equal to one full decode, and never half a character."""

import pytest
from conftest import byte_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_tokenizer import KINDS, builtin_tokenizer, sentencepiece_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from streamchat.engine.detokenize import (
    CONTEXT_GROUPS,
    MAX_UNFINISHED,
    REPLACEMENT,
    Detokenizer,
)
from streamchat.model.tokenizer import Tokenizer

FAMILY = "\U0001f469\u200d\U0001f469\u200d\U0001f467"
MIXED = f"na\xefve \u6211\u5f88 {FAMILY} \u05e9\u05dc\u05d5\u05dd e\u0301"


def metaspace_tokenizer():
    """Characters as tokens, and the decoder of that name, which strips the first token only."""
    alphabet = "\u2581abcdehilnorstvwxyz.,'?\u6211\u5f88"
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", *alphabet])}
    merges = [("\u2581", "x"), ("\u2581", "\u2581"), ("h", "e")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens(["<unk>", "<s>"])
    inner = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>")
    inner.clean_up_tokenization_spaces = True
    return Tokenizer(inner)


BYTES = Tokenizer(byte_tokenizer())
METASPACE = metaspace_tokenizer()
TOKENIZERS = pytest.mark.parametrize(
    "tokenizer",
    [BYTES, *(sentencepiece_tokenizer(kind) for kind in KINDS)],
    ids=["byte", *KINDS],
)

CHARACTERS = st.sampled_from(
    [
        "a",
        " ",
        "  ",
        "\n",
        "the quick",
        "x ,",
        "\xef",
        "\u6211",
        FAMILY,
        "\U0001f44d\U0001f3fd",
        "e\u0301",
        "\u05e9\u05c1",
        "\u0645\u0631\u062d\u0628\u0627",
        "\u0915\u093f",
        "\u200f",
        "\x00",
        "\U0010ffff",
    ]
)
TEXTS = st.lists(CHARACTERS | st.text(max_size=3), max_size=12).map("".join)


def pieces_of(decode, ids):
    """What each push gave, and the flush."""
    detokenizer = Detokenizer(decode)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


def assert_streams_as_one_decode(tokenizer, text):
    """The oracle is one decode of all ids."""
    ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer.decode, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if REPLACEMENT not in text:
        assert REPLACEMENT not in "".join(pieces[:-1])
        assert pieces[-1] == ""


@TOKENIZERS
def test_characters_split_over_tokens(tokenizer):
    """Joined pieces are the text, no piece has U+FFFD, and nothing is left for the end."""
    ids = tokenizer.encode(MIXED)
    pieces = pieces_of(tokenizer.decode, ids)
    assert "".join(pieces) == MIXED
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert pieces[-1] == ""
    assert len(ids) > len(MIXED)  # so that characters are split


@pytest.mark.builtin
def test_characters_split_over_built_in_tokens():
    """With the built-in tokenizer, where a space and an emoji are several tokens together."""
    tokenizer = builtin_tokenizer()
    assert_streams_as_one_decode(tokenizer, MIXED)
    ids = tokenizer.encode(f" {FAMILY}")
    assert REPLACEMENT in tokenizer.decode(ids[:1])
    assert "".join(pieces_of(tokenizer.decode, ids)) == f" {FAMILY}"


@TOKENIZERS
@given(text=TEXTS)
def test_any_text_streams_as_one_decode(tokenizer, text):
    """Emoji families, marks, right-to-left, CJK, runs of spaces: the oracle is one full decode."""
    assert_streams_as_one_decode(tokenizer, text)


@pytest.mark.parametrize(
    "text", ["    . x , y 's", "x  x", " he is here . ", "x" * 9, "a " * 9, "\u6211 \u5f88,"]
)
@pytest.mark.parametrize(
    "tokenizer", [METASPACE, *map(sentencepiece_tokenizer, KINDS)], ids=["decoder", *KINDS]
)
def test_leading_spaces_and_clean_up(tokenizer, text):
    """Equal to one decode at every prefix that ends on a character, spaces included."""
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer.decode)
    shown = ""
    for num_ids, token_id in enumerate(ids, 1):
        shown += detokenizer.push(token_id)
        if not detokenizer.num_pending:
            assert shown == tokenizer.decode(ids[:num_ids])
    assert shown + detokenizer.flush() == tokenizer.decode(ids)


def test_a_token_comes_out_at_once_when_it_is_whole():
    """Nothing is held back longer than its character: each push of ASCII gives its character."""
    assert pieces_of(BYTES.decode, BYTES.encode("ab \n")) == ["a", "b", " ", "\n", ""]
    assert pieces_of(BYTES.decode, BYTES.encode("\u6211a")) == ["", "", "\u6211", "a", ""]


def test_pending_ids_are_those_without_text():
    """`num_pending` counts the ids of the unfinished character."""
    detokenizer = Detokenizer(BYTES.decode)
    counts = []
    for token_id in BYTES.encode("a\U0001f469b"):
        detokenizer.push(token_id)
        counts.append(detokenizer.num_pending)
    assert counts == [0, 1, 2, 3, 0, 0]


def test_flush_gives_an_unfinished_character_once():
    """At the end half a character is one U+FFFD, as in the full decode; a second flush is empty."""
    ids = BYTES.encode("a\U0001f469")[:-1]
    detokenizer = Detokenizer(BYTES.decode)
    assert [detokenizer.push(i) for i in ids] == ["a", "", "", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


@given(TEXTS, st.integers(0, 50))
def test_flush_after_any_prefix_is_the_full_decode(text, length):
    """Wherever the ids end, inside a character too, pieces and flush are one decode of them."""
    ids = BYTES.encode(text)[:length]
    assert "".join(pieces_of(BYTES.decode, ids)) == BYTES.decode(ids)


def _byte_ids():
    """The id of each byte. ByteLevel writes what is not printable with characters from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    vocab = BYTES.inner.get_vocab()
    return [vocab[characters[byte]] for byte in range(256)]


BYTE_IDS = _byte_ids()


def byte_ids(data):
    """Ids of bytes that need not be UTF-8."""
    return [BYTE_IDS[byte] for byte in data]


@given(st.binary(max_size=3 * MAX_UNFINISHED))
@example(b"\xe6\x88a\xff\xe6\x88\x91")
@example(b"\xf0\x9f\x98\xf0\x9f\x98\x80")
def test_bytes_that_are_no_text(data):
    """Any bytes, also more than may wait, come out as in Python's own decoding with U+FFFD."""
    assert "".join(pieces_of(BYTES.decode, byte_ids(data))) == data.decode("utf-8", "replace")


@given(st.lists(st.binary(max_size=12).map(lambda data: data + b"a"), max_size=12))
def test_text_goes_on_after_bytes_that_are_no_text(runs):
    """Invalid bytes between letters, again and again: the oracle is Python's decoding."""
    data = b"".join(runs)
    assert "".join(pieces_of(BYTES.decode, byte_ids(data))) == data.decode("utf-8", "replace")


def test_a_long_run_of_bad_bytes_is_not_held_for_ever():
    """Text comes before the end, no more than `MAX_UNFINISHED` ids wait, and none gets lost."""
    detokenizer = Detokenizer(BYTES.decode)
    shown = ""
    for num_pushed, token_id in enumerate(byte_ids(b"\xff" * 1000), 1):
        shown += detokenizer.push(token_id)
        assert detokenizer.num_pending < MAX_UNFINISHED
        assert len(shown) == num_pushed - detokenizer.num_pending
    assert shown + detokenizer.flush() == "\ufffd" * 1000


@pytest.mark.parametrize("num_bad", range(MAX_UNFINISHED - 4, MAX_UNFINISHED + 1))
@pytest.mark.parametrize("character", ["\xe9", "\u6211", "\U0001f600"], ids=ascii)
def test_a_character_after_a_long_run_of_bad_bytes_is_not_lost(num_bad, character):
    """Bad bytes, then a valid character across the last id that waits: the oracle is Python's."""
    pieces = pieces_of(BYTES.decode, byte_ids(b"\xff" * num_bad + character.encode() + b"a"))
    assert "".join(pieces) == "\ufffd" * num_bad + character + "a"


# Special tokens have no text


@TOKENIZERS
@pytest.mark.parametrize(
    "num_special", [1, CONTEXT_GROUPS - 1, CONTEXT_GROUPS, MAX_UNFINISHED, 2 * MAX_UNFINISHED + 1]
)
def test_special_tokens_between_words(tokenizer, num_special):
    """Ids that decode to nothing take no space away from what follows them, however many.

    As many as the context is long, too, and as many as may wait.
    """
    first, second = tokenizer.encode("the fox"), tokenizer.encode_continuation(" sleeps")
    ids = [*first, *[1] * num_special, *second]
    assert "".join(pieces_of(tokenizer.decode, ids)) == "the fox sleeps"


def test_ids_without_text_wait_for_some():
    """They are given out with the text after them, or, where none comes, let go of in the end."""
    detokenizer = Detokenizer(BYTES.decode)
    (letter,) = BYTES.encode("a")
    for num_pending in range(1, MAX_UNFINISHED):
        assert detokenizer.push(1) == ""
        assert detokenizer.num_pending == num_pending
    assert detokenizer.push(1) == ""
    assert detokenizer.num_pending == 0
    assert [detokenizer.push(i) for i in (1, letter)] == ["", "a"]
    assert detokenizer.num_pending == 0
    assert detokenizer.flush() == ""


# Cost


@pytest.mark.parametrize(
    "ids",
    [
        BYTES.encode("x" * 5000),
        BYTES.encode(FAMILY * 278),
        byte_ids(b"\xff" * 5000),
        byte_ids((b"\xff" * 30 + b"a") * 161),
    ],
    ids=["no space", "families", "bad bytes", "bad runs"],
)
def test_work_per_token_is_constant(ids):
    """Over 5,000 tokens, each push decodes a bounded number of ids, early and late alike."""
    num_decoded = 0

    def decode(ids):
        nonlocal num_decoded
        num_decoded += len(ids)
        return BYTES.decode(ids)

    detokenizer = Detokenizer(decode)
    costs = []
    for token_id in ids:
        num_decoded = 0
        detokenizer.push(token_id)
        costs.append(num_decoded)
    assert len(costs) >= 4984
    assert max(costs) <= 2 * (CONTEXT_GROUPS + 1) * MAX_UNFINISHED
    early, late = sum(costs[500:1500]), sum(costs[-1000:])
    assert late <= 1.1 * early


@settings(max_examples=30)
@given(st.lists(st.integers(0, 258), max_size=31))
def test_any_ids_at_all(ids):
    """Whatever a model samples, special ids in the middle of a character too: one full decode."""
    assert "".join(pieces_of(BYTES.decode, ids)) == BYTES.decode(ids)
