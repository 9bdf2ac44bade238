"""Text to ids and back: the same ids however a line is cut, and nothing special by accident."""

import functools
import json

import pytest
from conftest import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from streamchat.model import builtin
from streamchat.model.tokenizer import Marked, Tokenizer
from streamchat.pipe.lines import MAX_PIECE_CHARS, LineSplitter
from streamchat.pipe.score import encode_piece

CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps on",
    "we hold these truths to be self-evident, that all men are created equal",
    "four score and seven years ago our fathers brought forth a new nation",
    "it's x , y 's and z . what is that? no, it isn't; is it?",
]
BYTE_BOS, SENTENCEPIECE_BOS = 1, 1


@functools.cache
def _trained(size):
    """Vocabulary and merges of a BPE trained on CORPUS, words beginning with U+2581."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=size, show_progress=False))
    model = json.loads(backend.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [tuple(m) for m in model["merges"]]


def sentencepiece_like(kind="metaspace"):
    """A tokenizer as SentencePiece models have them, with BOS, byte fallback and a strip decoder.

    A space is put before each text: by the pre-tokenizer, as in newer exports (`metaspace`, and
    `unsplit`, which merges over the whole text), or by the normalizer, as in Llama 2's.
    """
    tokens, merges = _trained(200)
    special = ["<unk>", "<s>", "</s>"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {token: i for i, token in enumerate([*special, *fallback, *tokens])}
    backend = Backend(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if kind == "normalizer":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            prepend_scheme="always", split=kind == "metaspace"
        )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", SENTENCEPIECE_BOS)]
    )
    backend.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


KINDS = ["metaspace", "unsplit", "normalizer"]


@functools.cache
def sentencepiece_tokenizer(kind):
    return Tokenizer(sentencepiece_like(kind))


@functools.cache
def builtin_tokenizer():
    """The built-in model's tokenizer without the model."""
    return Tokenizer(AutoTokenizer.from_pretrained(builtin.builtin_model(lambda _message: None)))


def byte_tokenizer_with(single):
    """The byte tokenizer with a template of its own around each text."""
    inner = byte_tokenizer()
    inner.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<|im_start|>", BYTE_BOS), ("<|im_end|>", 2)]
    )
    return inner


def split_and_encode(tokenizer, line):
    """Ids of a line as `pipe` feeds it, and in how many pieces."""
    splitter = LineSplitter()
    pieces = splitter.push(line.encode() + b"\n")
    assert splitter.close() == []
    return [i for piece in pieces for i in encode_piece(tokenizer, piece)], len(pieces)


def ids_by_the_pieces(tokenizer, first, rest):
    return tokenizer.encode(first) + tokenizer.encode_continuation(rest)


@pytest.mark.parametrize("inner", [byte_tokenizer(), sentencepiece_like()], ids=["byte", "sp"])
def test_half_a_character_becomes_a_replacement_character(inner):
    """A lone surrogate, which no tokenizer takes; two halves that belong together are one."""
    tokenizer = Tokenizer(inner)
    text, shown = "x\udce9 \ud83d\ude00\ud83d y", "x\ufffd \U0001f600\ufffd y"
    assert tokenizer.encode(text) == tokenizer.encode(shown)
    assert tokenizer.encode_continuation(text) == tokenizer.encode_continuation(shown)
    for is_text in (True, False):
        pieces = [[Marked("a"), Marked(t, is_text=is_text)] for t in (text, shown)]
        first, second = (tokenizer.encode_marked(p, continues=True) for p in pieces)
        assert first == second
    assert tokenizer.decode(tokenizer.encode(text)) == shown


# Special tokens


@pytest.mark.parametrize(
    ("inner", "text", "num_special"),
    [
        (byte_tokenizer(), "a<|im_end|>b<|im_start|><pad>", 3),
        (sentencepiece_like(), "a</s> b <s><unk>", 3),
    ],
    ids=["byte", "sentencepiece"],
)
def test_special_tokens_in_a_text_stay_text(inner, text, num_special):
    """A transcript that says `<|im_end|>` ends nothing: its ids are those of ordinary text.

    Also after the tokenizer was used in its usual way, which finds special tokens.
    """
    tokenizer = Tokenizer(inner)
    for encode in (tokenizer.encode, tokenizer.encode_continuation):
        assert any(i < num_special for i in inner.encode(text, add_special_tokens=False))
        tokenizer.bos_ids()
        ids = encode(text)
        assert all(i >= num_special for i in ids)
        assert tokenizer.decode(ids) == text


@pytest.mark.builtin
def test_special_tokens_stay_text_with_the_built_in_tokenizer():
    """`<|im_end|>` is not id 2, which would end an answer."""
    tokenizer = builtin_tokenizer()
    text = "<|im_start|>user\nhi<|im_end|><|endoftext|>"
    ids = tokenizer.encode(text)
    assert not set(ids) & set(tokenizer.inner.all_special_ids)
    assert tokenizer.decode(ids) == text


# BOS


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        (byte_tokenizer(), []),
        (byte_tokenizer_with("<|im_start|> $A"), [BYTE_BOS]),
        (byte_tokenizer_with("<|im_start|> $A <|im_end|>"), [BYTE_BOS]),
        (byte_tokenizer_with("$A <|im_end|>"), []),
        (sentencepiece_like(), [SENTENCEPIECE_BOS]),
    ],
    ids=["none", "bos", "bos and eos", "eos", "sentencepiece"],
)
def test_bos_comes_from_bos_ids_only(inner, expected):
    """BOS where the tokenizer adds one, never EOS; and no encoded text has either."""
    tokenizer = Tokenizer(inner)
    assert tokenizer.bos_ids() == expected
    special = {tokenizer.inner.bos_token_id, tokenizer.inner.eos_token_id}
    for text in ("a", "", "two words\n"):
        assert not special & {*tokenizer.encode(text), *tokenizer.encode_continuation(text)}


def test_a_tokenizer_without_bos_has_none():
    """No BOS token at all: nothing is put before a text."""
    inner = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().backend_tokenizer)
    assert inner.bos_token_id is None
    assert Tokenizer(inner).bos_ids() == []


@pytest.mark.parametrize("inner", [byte_tokenizer(), sentencepiece_like()], ids=["byte", "sp"])
def test_no_text_has_no_ids(inner):
    """Of the space before each text, nothing is left where there is no text."""
    tokenizer = Tokenizer(inner)
    assert tokenizer.encode("") == []
    assert tokenizer.encode_continuation("") == []


# Pieces of a line


@given(st.text(max_size=30), st.text(max_size=30))
def test_bytes_may_be_cut_anywhere(first, rest):
    """With one token for each byte, ids of two pieces are those of the whole, at any cut.

    The oracle counts bytes: id = place in ByteLevel's alphabet, so the length is the byte length.
    """
    tokenizer = Tokenizer(byte_tokenizer())
    ids = ids_by_the_pieces(tokenizer, first, rest)
    assert ids == tokenizer.encode(first + rest)
    assert len(ids) == len((first + rest).encode())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("line", CORPUS)
def test_a_line_may_be_cut_before_any_lone_space(kind, line):
    """SentencePiece: ids of the two pieces are those of the whole line, at every lone space."""
    tokenizer = sentencepiece_tokenizer(kind)
    whole = tokenizer.encode(line)
    assert max(len(token) for token in tokenizer.inner.convert_ids_to_tokens(whole)) > 2
    for cut, char in enumerate(line):
        if char == " ":
            assert ids_by_the_pieces(tokenizer, line[:cut], line[cut:]) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_continuation_inside_a_word_gets_no_space(kind):
    """A cut inside a word changes the ids, but no space comes into the text.

    Encoding the rest as a text of its own would give "qui ck".
    """
    tokenizer = sentencepiece_tokenizer(kind)
    line = "the quick \u6211 fox"
    for cut in range(1, len(line)):
        ids = ids_by_the_pieces(tokenizer, line[:cut], line[cut:])
        assert tokenizer.decode(ids) == line
    assert tokenizer.encode_continuation("ck") != tokenizer.encode("ck")


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(
    first=st.text(alphabet="ab \t\u6211", max_size=8),
    rest=st.text(alphabet="ab \t\u6211.", max_size=8),
)
def test_no_cut_adds_or_takes_a_space(kind, first, rest):
    """Where pieces meet, in runs of spaces too, the ids decode to the text that was there."""
    tokenizer = sentencepiece_tokenizer(kind)
    assert tokenizer.decode(ids_by_the_pieces(tokenizer, "x" + first, rest)) == "x" + first + rest


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_line_has_the_ids_of_the_whole(kind):
    """With SentencePiece, what `pipe` feeds of a long line is the whole line's encoding."""
    tokenizer = sentencepiece_tokenizer(kind)
    line = " ".join(CORPUS * 60)
    ids, num_pieces = split_and_encode(tokenizer, line)
    assert num_pieces > 3
    assert ids == tokenizer.encode(line + "\n")


@pytest.mark.builtin
def test_a_long_line_has_the_built_in_ids_of_the_whole(union_text):
    """With the built-in tokenizer: 100,000 characters of speeches on one line."""
    tokenizer = builtin_tokenizer()
    line = " ".join(union_text.split())[:100_000]
    ids, num_pieces = split_and_encode(tokenizer, line)
    assert num_pieces >= 100_000 // MAX_PIECE_CHARS
    assert ids == tokenizer.encode(line + "\n")


@pytest.mark.builtin
def test_the_built_in_tokenizer_may_be_cut_before_any_lone_space(union_text):
    """Every cut before a space of a few sentences gives the whole's ids; inside a word it may not.

    So it is the cut rule that makes them equal, and not a tokenizer that is equal anywhere.
    """
    tokenizer = builtin_tokenizer()
    line = " ".join(union_text.split())[:600]
    whole = tokenizer.encode(line)
    equal_at = [
        ids_by_the_pieces(tokenizer, line[:cut], line[cut:]) == whole for cut in range(len(line))
    ]
    assert all(equal for equal, char in zip(equal_at, line, strict=True) if char == " ")
    assert not all(equal_at)


@pytest.mark.parametrize(
    "tokenizer",
    [Tokenizer(byte_tokenizer()), *map(sentencepiece_tokenizer, KINDS)],
    ids=["byte", *KINDS],
)
def test_the_spaces_that_decoding_leaves_out(tokenizer):
    """`lead` and the text of ids make what they say in a stream, for one word or several spaces."""
    for text in (" dog", "  dog", "dog", "."):
        ids = tokenizer.encode_continuation(text)
        alone = tokenizer.decode(ids)
        assert tokenizer.lead(ids, alone) + alone == text
    assert tokenizer.lead([1], "") == ""


# Back to text


@given(st.text())
def test_bytes_decode_to_the_text(text):
    """Any text comes back as it was, NUL, BOM, U+2028 and joiners included."""
    tokenizer = Tokenizer(byte_tokenizer())
    assert tokenizer.decode(tokenizer.encode(text)) == text


TEXTS = [
    "x",
    "na\xefve \u6211\u5f88 \u05e9\u05dc\u05d5\u05dd e\u0301",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 a",
    "a\x00b \ufeffc\u2028d",
    "it 's , so . n't ? that",
    "two  spaces   three\ttab",
    "line\nline\r\n",
]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("kind", KINDS)
def test_sentencepiece_decodes_to_the_text(kind, text):
    """Spaces, bytes that no token has, and punctuation come back as they were."""
    tokenizer = sentencepiece_tokenizer(kind)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.builtin
@pytest.mark.parametrize("text", [*TEXTS, "    . x , y 's"], ids=range(len(TEXTS) + 1))
def test_the_built_in_tokenizer_decodes_to_the_text(text):
    """The same with the built-in tokenizer, spaces in front included."""
    tokenizer = builtin_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("inner", [byte_tokenizer(), sentencepiece_like()], ids=["byte", "sp"])
def test_spaces_before_punctuation_are_not_cleaned_up(inner):
    """Decoding takes nothing away, even for a tokenizer that wants its output cleaned up."""
    inner.clean_up_tokenization_spaces = True
    inner.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    tokenizer = Tokenizer(inner)
    text = "x , y 's . do n't ?"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_no_text():
    """An id that is special decodes to nothing, wherever it stands."""
    tokenizer = Tokenizer(byte_tokenizer())
    ids = tokenizer.encode("ab")
    assert tokenizer.decode([1, ids[0], 2, 0, ids[1], 2]) == "ab"
    assert tokenizer.decode([1, 2]) == ""
    assert tokenizer.decode([]) == ""
