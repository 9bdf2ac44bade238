"""Recall by meaning: a paraphrase is found, words still count, and the file can be lost.

The stand-in for a model gives words of one meaning one vector, so what should be found is known by
construction; the library's own model is made of the same table, in a folder. The oracle of the
ranking is a plain loop over all that was said.
"""

import importlib.util
import math
import operator
import shutil
import sys

import numpy as np
import pytest

from streamchat.errors import ModelError, SessionError, UsageError
from streamchat.store import vectors as vectors_module
from streamchat.store.log import Log, Passage
from streamchat.store.recall import Recalled, search
from streamchat.store.vectors import FILE_NAME, MIN_COSINE, Vectors, fused, load, save

MEANINGS = [
    {"herb", "coriander", "parsley"},
    {"dislike", "hate", "stand"},
    {"sister", "sibling"},
    {"repairs", "mends", "violins", "instruments"},
    {"ship", "boat", "vessel"},
    {"rain", "weather"},
]
DIM = len(MEANINGS)


class ByMeaning:
    """Counts a text's words by what they mean; `embedded` is all that it was given."""

    def __init__(self, fingerprint="one"):
        self.fingerprint = fingerprint
        self.embedded = []

    def embed(self, texts):
        self.embedded += texts
        return np.array([self.one(text) for text in texts], np.float64)

    @staticmethod
    def one(text):
        words = [word.strip(".,?:").lower() for word in text.split()]
        return [3.0 * sum(word in meaning for word in words) for meaning in MEANINGS]


@pytest.fixture
def log(tmp_path):
    with Log(tmp_path / "log.sqlite") as log:
        yield log


def add(log, *texts, created=0.0, speaker=None):
    """Log texts as passages of ten tokens each."""
    start = log.next_position()
    return log.append(
        Passage(
            role="user",
            text=text,
            created=created,
            first_position=start + 10 * n,
            last_position=start + 10 * n + 9,
            speaker=speaker,
        )
        for n, text in enumerate(texts)
    )


def texts(found):
    return [recalled.text for recalled in found]


SAID = ["I cannot stand coriander", "my sister mends old things", "the boat left", "filler"]


# What is found


def test_a_paraphrase_is_found_that_words_miss(log, tmp_path):
    """No word in common, one meaning."""
    add(log, *SAID)
    vectors = Vectors(tmp_path / FILE_NAME, ByMeaning())
    for question, said in [
        ("Which herb do you hate?", SAID[0]),
        ("sibling?", SAID[1]),
        ("vessel", SAID[2]),
    ]:
        assert said not in texts(search(log, question))
        assert texts(vectors.search(log, question))[0] == said


def test_words_without_a_meaning_are_still_found(log, tmp_path):
    """A name that the model does not know, and a question that has no vector at all."""
    add(log, *SAID, "Okonkwo was here")
    vectors = Vectors(tmp_path / FILE_NAME, ByMeaning())
    assert texts(vectors.search(log, "Okonkwo?")) == ["Okonkwo was here"]
    assert vectors.search(log, "unheard of") == []
    assert vectors.search(log, " ") == []
    assert vectors.search(log, "\udc80") == []


def test_what_both_rankings_have_comes_first(log, tmp_path):
    """A match in words and meaning stands before those in one of them."""
    add(log, "a vessel", "the ship Pequod", "Pequod", "the weather")
    found = Vectors(tmp_path / FILE_NAME, ByMeaning()).search(log, "boat Pequod", limit=10)
    assert texts(found)[0] == "the ship Pequod"
    assert set(texts(found)) == {"a vessel", "the ship Pequod", "Pequod"}


def test_rankings_are_merged_by_their_ranks(log):
    """Sums of 1 / (60 + rank), by hand; scores do not count; the first ranking breaks ties."""
    ids = add(log, "a", "b", "c", "d")
    a, b, c, d = (Recalled(p, p.text, 99.0) for p in log.get(ids))
    found = fused([[a, b, c], [c, d, a]])
    assert texts(found) == ["a", "c", "b", "d"]
    expected = [1 / 61 + 1 / 63, 1 / 63 + 1 / 61, 1 / 62, 1 / 62]
    assert [r.score for r in found] == pytest.approx(expected)
    assert fused([[], []]) == []


@pytest.mark.parametrize("before", [None, 0, 15, 30, 100])
@pytest.mark.parametrize("pinned", [range(0), range(12)])
def test_meaning_finds_what_has_left_in_the_order_of_the_cosine(log, tmp_path, before, pinned):
    """Against a loop over the passages, where no word of the question was said."""
    said = ["ship", "ship rain", "ship rain rain", "ship rain rain rain rain", "rain", "ship"]
    add(log, *said)
    log.append([Passage(role="note", text="ship of a note", created=0.0)])
    found = Vectors(tmp_path / FILE_NAME, ByMeaning()).search(
        log, "vessel", before=before, pinned=pinned, limit=20
    )

    def cosine(text):
        one, other = ByMeaning.one(text), ByMeaning.one("vessel")
        return sum(map(operator.mul, one, other)) / math.hypot(*one) / math.hypot(*other)

    expected = [
        p
        for p in log.passages()
        if (before is None or (p.last_position is not None and p.last_position < before))
        and p.last_position not in pinned
        and cosine(p.text) >= MIN_COSINE
    ]
    expected.sort(key=lambda p: -cosine(p.text))
    assert [r.passage for r in found] == expected


def test_a_long_passage_is_found_by_its_part_and_by_who_says_it(log, tmp_path):
    """The piece is given back, without the speaker's name."""
    sentences = [f"Sentence {n} is about number {n}. " for n in range(100)]
    sentences[70] = "She mends violins. "
    (id_,) = add(log, "".join(sentences), speaker="Sister")
    embedder = ByMeaning()
    (best, *_) = Vectors(tmp_path / FILE_NAME, embedder).search(log, "instruments")
    assert "She mends violins." in best.text
    assert best.text in best.passage.text
    assert best.passage.id == id_
    assert all(text.startswith("Sister: ") for text in embedder.embedded[:-1])


# Work


def test_each_piece_is_embedded_once_and_only_when_it_has_left(log, tmp_path):
    """The second search embeds its question alone."""
    add(log, *SAID)
    embedder = ByMeaning()
    vectors = Vectors(tmp_path / FILE_NAME, embedder)
    vectors.search(log, "boat", before=20)
    vectors.search(log, "ship", before=20)
    vectors.search(log, "herb", before=40)
    assert embedder.embedded == [*SAID[:2], "boat", "ship", *SAID[2:], "herb"]


def test_the_work_of_one_search_is_bounded(log, tmp_path, monkeypatch):
    """What was not reached is found by its words, and the next search goes on."""
    monkeypatch.setattr(vectors_module, "MAX_NEW", 2)
    add(log, *SAID)
    embedder = ByMeaning()
    vectors = Vectors(tmp_path / FILE_NAME, embedder)
    assert texts(vectors.search(log, "vessel")) == []
    assert len(embedder.embedded) == 3
    assert texts(vectors.search(log, "vessel")) == ["the boat left"]


# The file


@pytest.fixture
def saving(monkeypatch):
    monkeypatch.setattr(vectors_module, "SAVE_EVERY", 1)


@pytest.mark.usefixtures("saving")
def test_the_next_run_reads_them(log, tmp_path):
    """It embeds nothing but the question, and finds the same."""
    add(log, *SAID)
    before = Vectors(tmp_path / FILE_NAME, ByMeaning()).search(log, "vessel")
    embedder = ByMeaning()
    assert Vectors(tmp_path / FILE_NAME, embedder).search(log, "vessel") == before
    assert embedder.embedded == ["vessel"]
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o077 == 0


@pytest.mark.usefixtures("saving")
@pytest.mark.parametrize("loss", ["missing", "empty", "cut", "bit", "model", "folder", "new log"])
def test_what_is_lost_is_made_again(log, tmp_path, loss):
    """Whatever became of the file, the right thing is found."""
    path = tmp_path / FILE_NAME
    add(log, *SAID)
    Vectors(path, ByMeaning()).search(log, "vessel")
    data = bytearray(path.read_bytes())
    embedder = ByMeaning("other" if loss == "model" else "one")
    if loss in ("missing", "folder"):
        path.unlink()
    if loss == "folder":
        path.mkdir()
    elif loss == "empty":
        path.write_bytes(b"")
    elif loss == "cut":
        path.write_bytes(data[:-3])
    elif loss == "bit":
        data[-3] ^= 1
        path.write_bytes(data)
    if loss == "new log":  # counts its passages from 1 again
        with Log(tmp_path / "new.sqlite") as new:
            add(new, *reversed(SAID), created=1.0)
            assert texts(Vectors(path, embedder).search(new, "vessel")) == ["the boat left"]
    else:
        assert texts(Vectors(path, embedder).search(log, "vessel")) == ["the boat left"]
    assert embedder.embedded[:-1] == (SAID[::-1] if loss == "new log" else SAID)


@pytest.mark.parametrize("shape", [(0, 3), (5, 4)])
def test_a_file_gives_back_what_it_was_given(tmp_path, shape):
    """Bit for bit; and nothing to another model."""
    rng = np.random.default_rng(1)
    given = {
        (n + 1, 10 * n, 0.1 * n): row
        for n, row in enumerate(rng.standard_normal(shape).astype(np.float16))
    }
    save(tmp_path / FILE_NAME, "model", given)
    back = load(tmp_path / FILE_NAME, "model")
    assert back.keys() == given.keys()
    assert all((back[key] == given[key]).all() for key in given)
    assert load(tmp_path / FILE_NAME, "another") == {}


def test_what_was_taken_back_leaves_the_file(log, tmp_path):
    """With the next search, however little is new."""
    path = tmp_path / FILE_NAME
    ids = add(log, *SAID)
    vectors = Vectors(path, ByMeaning())
    vectors.search(log, "vessel")
    assert not path.exists()
    log.remove(ids[2])
    assert vectors.search(log, "vessel") == []
    assert {key[0] for key in load(path, "one")} == set(ids[:2])


@pytest.mark.usefixtures("saving")
def test_a_disk_that_refuses_costs_time_alone(log, tmp_path):
    """Nothing is said: the log, on the same disk, says it."""
    add(log, *SAID)
    path = tmp_path / "gone" / FILE_NAME
    assert texts(Vectors(path, ByMeaning()).search(log, "vessel")) == ["the boat left"]
    with pytest.raises(SessionError, match="cannot save vectors"):
        save(path, "one", {})


# The library


@pytest.fixture
def model_folder(tmp_path):
    """A model of the library, made of the table of meanings."""
    model2vec = pytest.importorskip("model2vec", reason="the extra `embeddings` is not installed")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.normalizers import Lowercase
    from tokenizers.pre_tokenizers import Whitespace

    vocabulary = ["[UNK]", *sorted(set().union(*MEANINGS))]
    tokenizer = Tokenizer(WordLevel({w: n for n, w in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = Lowercase(), Whitespace()
    table = np.array([ByMeaning.one(word) for word in vocabulary], np.float32)
    model2vec.StaticModel(table, tokenizer).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_model_in_a_folder_finds_by_meaning(log, tmp_path, model_folder):
    """As the stand-in does, which is the same table; and is known again by its content."""
    from streamchat.chat.embedder import load_embedder

    embedder = load_embedder(str(model_folder))
    np.testing.assert_allclose(
        embedder.embed(["mends the boat", "unheard"]),
        [[0, 0, 0, 1.5, 1.5, 0], [0] * DIM],
    )
    add(log, *SAID)
    found = Vectors(tmp_path / FILE_NAME, embedder).search(log, "Which herb do you hate?")
    assert texts(found)[0] == SAID[0]
    shutil.copytree(model_folder, tmp_path / "copy")
    assert load_embedder(str(tmp_path / "copy")).fingerprint == embedder.fingerprint


@pytest.mark.parametrize("what", ["nowhere", "empty", "damaged"])
def test_a_model_that_cannot_be_loaded_is_one_line(
    tmp_path, model_folder, what, command, tiny_folder
):
    """With its name, and exit code 3."""
    folder = tmp_path / what
    if what == "empty":
        folder.mkdir()
    elif what == "damaged":
        shutil.copytree(model_folder, folder)
        (folder / "model.safetensors").write_bytes(b"no")
    done = command(
        *("chat", "--model", str(tiny_folder), "--session", "a", "--recall-model", str(folder))
    )
    assert (done.code, done.out) == (ModelError.exit_code, "")
    [line] = done.err.splitlines()
    assert f"cannot load the recall model {folder}: " in line


def test_a_missing_library_is_one_line(monkeypatch, command, tiny_folder):
    """It names the extra; exit code 2."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "model2vec" else find(name)
    )
    done = command("chat", "--model", str(tiny_folder), "--recall-model", "any")
    assert (done.code, done.out) == (UsageError.exit_code, "")
    [line] = done.err.splitlines()
    assert line.endswith("--recall-model needs model2vec: pip install 'streamchat-cli[embeddings]'")


def test_a_chat_recalls_by_meaning_and_its_session_remembers_the_model(
    command, tiny_folder, model_folder, monkeypatch
):
    """What has left is told again in the turn that asks in other words; not without the model.

    The next run needs neither the option nor the folder it was in.
    """
    call = ["chat", "-m", tiny_folder, "--device", "cpu", "--session", "tea", "--window", "400"]
    call += ["--quantize", "none", "--max-new", "1", "--recall", "--no-self-check"]
    filler = "".join(
        f"Number {n} of the fillers is here, and it is long enough.\n" for n in range(9)
    )
    said = f"{SAID[0]}\n{filler}".encode()
    asked = b"Which herb?\n"
    monkeypatch.chdir(model_folder.parent)
    assert SAID[0] not in command(*call, stdin=said + asked).err
    first = command(*call, "--recall-model", "model", stdin=asked)
    monkeypatch.chdir("/")
    second = command(*call, stdin=filler.encode() + asked)
    third = command(*call, "--recall-model", "", stdin=filler.encode() + asked)
    assert (first.code, second.code, third.code) == (0, 0, 0), (first.err, second.err, third.err)
    assert SAID[0] in first.err
    assert SAID[0] in second.err
    assert SAID[0] not in third.err


def test_nothing_is_imported_for_a_chat_without_it(command, tiny_folder, monkeypatch):
    """Neither the library nor what uses it, also where words are recalled."""
    names = ("model2vec", "streamchat.store.vectors", "streamchat.chat.embedder")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    call = ["chat", "-m", tiny_folder, "--device", "cpu", "--quantize", "none", "--no-self-check"]
    done = command(*call, "--window", "60", "--max-new", "1", "--recall", stdin=b"Hi\nYou?\n")
    assert done.code == 0, done.err
    assert not any(name in sys.modules for name in names)
