"""Recall: what was said long ago is found by its words, and no question is an error.

The oracle for what may be found is a plain filter over the list of passages; for how well, facts
that are planted in other text and asked for (`benchmarks/facts.py`).
"""

import random
import sqlite3

import pytest
from facts import LITERAL, PARAPHRASED
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamchat.store.log import Log, Passage
from streamchat.store.recall import MAX_WORDS, Recalled, search, within_budget
from streamchat.store.words import PIECE_CHARS, pieces, query_words, spaced


@pytest.fixture
def log(tmp_path):
    with Log(tmp_path / "log.sqlite") as log:
        yield log


def add(log, *texts, speaker=None, role="user"):
    """Log texts as passages of ten tokens each."""
    start = log.next_position()
    return log.append(
        Passage(
            role=role,
            text=text,
            created=0.0,
            first_position=start + 10 * n,
            last_position=start + 10 * n + 9,
            speaker=speaker,
        )
        for n, text in enumerate(texts)
    )


def texts(found):
    return [recalled.text for recalled in found]


# What is found


def test_the_best_match_comes_first(log):
    """More of the rare words count for more; what has none of the words is not found."""
    add(log, "the ship", "the Pequod, a whaling ship", "nothing of that kind", "a whaling song")
    found = search(log, "What was the whaling ship called?")
    assert texts(found)[0] == "the Pequod, a whaling ship"
    assert "nothing of that kind" not in texts(found)
    assert [r.score for r in found] == sorted((r.score for r in found), reverse=True)


def test_forms_of_a_word_are_the_same_word(log):
    """Endings, case and accents do not matter."""
    add(log, "She repairs violins in Zürich", "filler one", "filler two")
    for question in ("VIOLIN", "who repaired it?", "zurich", "a repairing of Violins"):
        assert texts(search(log, question)) == ["She repairs violins in Zürich"]


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("我的姐姐在柏林修小提琴", "谁会修小提琴?"),
        ("会議は火曜日の午後です", "火曜日"),
        ("ประชุมวันอังคารตอนบ่าย", "วันอังคาร"),
        ("회의는 화요일 오후입니다", "화요일"),
        ("η συνάντηση είναι την Τρίτη", "τρίτη"),
        ("बैठक मंगलवार को है", "मंगलवार"),
        ("mixed 会議 text", "会議"),
    ],
    ids=["Chinese", "Japanese", "Thai", "Korean", "Greek", "Hindi", "mixed"],
)
def test_scripts_with_and_without_spaces(log, text, question):
    """A part of a sentence is found in scripts that put no spaces between words, too."""
    add(log, "filler", text, "more filler", "別の文", "别的")
    assert texts(search(log, question))[0] == text


def test_a_speaker_is_found_by_name(log):
    """Who said something is part of what is looked for; the text given back is without it."""
    add(log, "the budget is too small", speaker="Okonkwo")
    add(log, "the budget is fine", "the weather", speaker="Lee")
    assert texts(search(log, "what did Okonkwo say about the budget?"))[0] == (
        "the budget is too small"
    )


def test_a_long_passage_is_found_by_its_part(log):
    """What is given back is the piece, a whole sentence or more, with the passage around it."""
    sentences = [f"Sentence {n} is about number {n}. " for n in range(200)]
    sentences[150] = "The harbour master is called Quill. "
    (id_,) = add(log, "".join(sentences))
    (best, *_) = search(log, "Who is the harbour master?")
    assert "The harbour master is called Quill." in best.text
    assert len(best.text) <= PIECE_CHARS
    assert best.text.endswith(". ")
    assert best.passage.id == id_
    assert best.passage.text == "".join(sentences)


def test_a_question_of_common_words_alone_finds_something(log):
    """Where no word is rare, the rarest is looked for."""
    add(log, *["the ship was there"] * 40, "the end")
    assert texts(search(log, "the ship")) == ["the ship was there"] * 3
    assert texts(search(log, "the"))
    assert search(log, "absent") == []


def test_a_long_question_is_looked_for_by_its_rarest_words(log):
    """A word that only one passage has is not drowned by those before it."""
    add(log, *(f"common{n} common{n + 1}" for n in range(60)), "zygote", *["filler"] * 10)
    question = " ".join(f"common{n}" for n in range(2 * MAX_WORDS)) + " zygote"
    assert "zygote" in texts(search(log, question, limit=100))


# What may be found


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    before=st.none() | st.integers(0, 130),
    pinned=st.integers(0, 40),
    shift=st.sampled_from([0, 50]),
    limit=st.integers(1, 20),
)
def test_only_what_has_left_the_window_is_found(tmp_path, before, pinned, shift, limit):
    """Against a filter in plain Python over all that was said, also where a stream began anew."""
    path = tmp_path / "positions.sqlite"
    pinned = range(shift, shift + pinned)
    fresh = not path.exists()
    with Log(path) as log:
        if fresh:
            add(log, *(f"ship number{n}" for n in range(12)))
            log.append([Passage(role="note", text="ship of a note", created=0.0)])
            log.append(
                [Passage(role="a", text="ship", created=0, first_position=7, last_position=6)]
            )
        found = search(log, "ship", before=before, pinned=pinned, limit=limit)
        expected = [
            p.id
            for p in log.passages()
            if (before is None or (p.last_position is not None and p.last_position < before))
            and p.last_position not in pinned
        ]
    assert len(found) == min(limit, len(expected))
    assert {r.passage.id for r in found} <= set(expected)


def test_a_passage_that_is_half_gone_is_found_by_the_half_that_is_gone(log):
    """The positions of its pieces are those of its letters, about."""
    text = "alpha ship. " * 100 + "omega ship. " * 100
    log.append([Passage(role="user", text=text, created=0, first_position=0, last_position=599)])
    found = search(log, "ship", before=300, limit=10)
    assert found
    assert all("omega" not in r.text for r in found)
    assert len(search(log, "omega ship", before=600, limit=10)) > len(found)


def test_what_was_taken_back_is_not_found(log):
    """Nor counted: the rest is ranked as though it had never been there."""
    add(log, "the ship sails", "a harbour")
    alone = search(log, "ship harbour")
    for _ in range(3):
        (id_,) = add(log, "ship ship harbour")
        assert len(search(log, "ship harbour")) == 3
        log.remove(id_)
    assert search(log, "ship harbour") == alone


# No question is an error


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text(max_size=40)
    | st.text(alphabet="\"'*^:+-(){}[],.\\;%_ \x00aANDORT\u0301\udc80会", max_size=30)
    | st.lists(
        st.sampled_from(
            ["AND", "OR", "NOT", "NEAR(ship, 2)", '"', "ship*", "text:ship", "^ship", "-ship", "("]
        )
    ).map(" ".join)
)
def test_any_text_may_be_asked(tmp_path, question):
    """Quotes, operators, column names, NUL and surrogates: never an error, never an operator."""
    path = tmp_path / "asked.sqlite"
    fresh = not path.exists()
    with Log(path) as log:
        if fresh:
            add(log, "the ship", "near and far", "or not")
        found = search(log, question)
    assert all(isinstance(r, Recalled) for r in found)


def test_operators_are_words(log):
    """`NOT` finds what says not, and takes nothing away."""
    add(log, "ship", "not a boat", "near the pier")
    assert set(texts(search(log, "ship NOT boat NEAR pier"))) == {
        "ship",
        "not a boat",
        "near the pier",
    }


@pytest.mark.parametrize("question", ["", " ", "?!", "\x00", '"', "\udc80", "absent"])
def test_a_question_without_words_finds_nothing(log, question):
    """Nor does one whose words were never said."""
    add(log, "the ship")
    assert search(log, question) == []
    assert search(log, question, before=100, limit=5) == []


def test_an_empty_log_is_searched(log):
    """Before anything was said."""
    assert search(log, "ship") == []


@given(st.text())
def test_words_of_a_question_need_no_escape(question):
    """Letters, digits, marks and single spaces: SQLite's own tokenizer makes words of each."""
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE VIRTUAL TABLE t USING fts5(x)")
    for word in query_words(question):
        assert not set(word) & set("\"'\x00*^:()")
        connection.execute("SELECT * FROM t WHERE t MATCH ?", (f'"{word}"',)).fetchall()
    connection.close()


# Pieces and budget


@given(st.lists(st.sampled_from(["word ", "end. ", "\n", "。", "x" * 300, "会", " "])).map("".join))
def test_pieces_are_the_text_and_no_longer_than_they_may_be(text):
    """Joined they are the text; none is empty unless the text is."""
    cut = list(pieces(text))
    assert "".join(text[p.start : p.stop] for p in cut) == text
    assert all(len(p) <= PIECE_CHARS for p in cut)
    assert all(len(p) > PIECE_CHARS // 2 for p in cut[:-1])
    assert all(len(p) for p in cut) or text == ""


def test_pieces_end_behind_sentences_or_else_words():
    """In the second half of a piece: a sentence's end, a space, anything."""
    sentence = "a" * (PIECE_CHARS // 2) + '." Then words and words'
    text = sentence + " word" * PIECE_CHARS
    first, second, *_ = pieces(text)
    assert text[: first.stop].endswith('." ')
    assert text[: second.stop].endswith(" ")
    assert next(iter(pieces("a" * 2 * PIECE_CHARS))).stop == PIECE_CHARS


def test_spaces_are_put_where_a_script_has_none():
    """And nowhere else."""
    assert spaced("the ship 42").split() == ["the", "ship", "42"]
    assert spaced("ab会議cd").split() == ["ab", "会", "議", "cd"]
    assert list(query_words("ab会議室cd 会 well-known")) == [
        *("ab", "会 議", "議 室", "cd", "会", "well", "known"),
    ]


def test_a_budget_is_filled_with_the_best_that_fit(log):
    """One that is too long is left out, and the next may still fit; shown in the log's order."""
    ids = add(log, "four words of ship", "ship " * 9, "ship two", "ship")
    found = [
        Recalled(p, p.text, score) for p, score in zip(log.get(ids), (1, 4, 3, 2), strict=True)
    ]
    found.sort(key=lambda r: -r.score)

    def within(num_words):
        return texts(
            within_budget(found, lambda taken: len(" ".join(texts(taken)).split()) <= num_words)
        )

    assert within(3) == ["ship two", "ship"]
    assert within(7) == ["four words of ship", "ship two", "ship"]
    assert within(12) == ["ship " * 9, "ship two", "ship"]
    assert within(0) == []


# How well


def test_planted_facts_are_found_in_their_own_words(log):
    """At least 95 of 100 among the first three, in a log of 2,000 passages of other text.

    The other text has the facts' own words at random, so that no word is rare by luck.
    """
    rng = random.Random(5)
    facts = [*LITERAL, *PARAPHRASED]
    words = " ".join(text for fact in facts for text in fact).split()
    said = [" ".join(rng.choices(words, k=40)) for _ in range(2000)]
    for statement, _ in facts:
        said.insert(rng.randrange(len(said) + 1), statement)
    add(log, *said)
    found = sum(statement in texts(search(log, question)) for statement, question in LITERAL)
    assert len(LITERAL) == len(PARAPHRASED) == 100
    assert found >= 95


def test_facts_are_different_and_asked_differently():
    """No statement or question twice; and those in other words share few words with theirs."""
    facts = [*LITERAL, *PARAPHRASED]
    assert len({statement for statement, _ in facts}) == 200
    assert len({question for _, question in facts}) == 200

    def long_words(text):
        return {w.strip(".,?").removesuffix("'s").lower() for w in text.split() if len(w) > 5}

    shared = [len(long_words(s) & long_words(q)) for s, q in PARAPHRASED]
    assert sum(shared) / len(shared) < 0.2
