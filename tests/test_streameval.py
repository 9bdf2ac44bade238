"""`bench --streameval`: what is asked, what counts as right, and a rememberer of known score."""

import json
import random
import re
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from conftest import byte_tokenizer

from streamchat import CacheConfig, ConfigError
from streamchat.bench import streameval
from streamchat.bench.perplexity import with_policies
from streamchat.bench.streameval import (
    LINES_BETWEEN,
    NUM_DISTRACTORS,
    Answer,
    Form,
    form_for,
    make_exam,
    scores,
    take,
    verdict,
)
from streamchat.cli.bench_eval import parse_distances
from streamchat.config import POLICIES
from streamchat.engine.stream import Stream
from streamchat.errors import UsageError
from streamchat.events import TextDelta
from streamchat.model.tokenizer import Tokenizer

TOKENIZER = Tokenizer(byte_tokenizer())
CACHE = CacheConfig(sink_size=30, window_size=900)
LINE = re.compile(r"line (\d+): the register content of ([\w-]+) is (\d{5})\n")


def an_exam(distances=(300, 800, 1200), num_questions=5, seed=0, *, plain=False, cache=CACHE):
    form = form_for(TOKENIZER, plain=plain)
    return make_exam(TOKENIZER, form, cache, distances, num_questions, seed)


def fed_until(exam):
    """For each part: the ids fed until its questions are asked."""
    ids = []
    for part, questions in exam.parts:
        ids += part
        yield list(ids), questions


# What is asked


@pytest.mark.parametrize("plain", [True, False])
def test_facts_lie_where_they_are_said_to_lie(plain):
    """Each question is about the oldest line that begins within its distance."""
    form = form_for(TOKENIZER, plain=plain)

    def distance(question_ids, start):
        return len(ids) + len(question_ids) - start

    for ids, questions in fed_until(an_exam(plain=plain)):
        assert len(ids) >= max(CACHE.cache_size, CACHE.sink_size + 1200)
        for question in questions:
            line = LINE.match(TOKENIZER.decode(ids[question.start :]))
            asked = TOKENIZER.decode(question.ids)
            assert line[3] == question.value
            assert asked.startswith(f"\nQuestion: What is the register content of {line[2]}?")
            assert asked.endswith(f"The register content of {line[2]} is")
            assert TOKENIZER.decode(question.choices[question.right]) == f" {question.value}"
            assert distance(question.ids, question.start) <= question.distance
            *_, older = LINE.finditer(TOKENIZER.decode(ids[: question.start]))
            ids_of_older = form.question_ids(TOKENIZER, older[2])
            start_of_older = question.start - len(older[0])
            assert distance(ids_of_older, start_of_older) > question.distance


def test_names_and_numbers_come_once():
    """No number is a line's twice, and what there is to choose from stands in no line."""
    exam = an_exam(num_questions=20)
    *_, (ids, _) = fed_until(exam)
    lines = LINE.findall(TOKENIZER.decode(ids))
    assert [int(number) for number, _, _ in lines] == list(range(1, len(lines) + 1))
    values = [value for _, _, value in lines]
    others = []
    for _, questions in exam.parts:
        assert len({question.distance for question in questions}) == 3
        for question in questions:
            choices = [TOKENIZER.decode(ids).strip() for ids in question.choices]
            assert len(choices) == NUM_DISTRACTORS + 1
            others += [choice for choice in choices if choice != question.value]
    assert len(others) == 20 * 3 * NUM_DISTRACTORS
    assert len({*values, *others}) == len(values) + len(others)
    assert len({name for _, name, _ in lines}) == len(lines)
    assert {q.right for _, questions in exam.parts for q in questions} == set(range(5))


def test_names_go_on_when_words_run_out():
    facts = streameval._Facts(0)
    names = [facts.name() for _ in range(2000)]
    assert len(set(names)) == 2000
    assert names[576] == f"{names[0]}-2"


def test_questions_come_every_few_lines():
    lengths = [len(LINE.findall(TOKENIZER.decode(ids))) for ids, _ in fed_until(an_exam())]
    assert all(after - before == LINES_BETWEEN for before, after in pairwise(lengths))


def test_the_same_seed_makes_the_same_exam():
    assert an_exam(seed=3) == an_exam(seed=3)
    assert an_exam(seed=3) != an_exam(seed=4)


def test_a_chat_has_a_header_and_a_plain_text_none():
    chat, plain = form_for(TOKENIZER, plain=False), form_for(TOKENIZER, plain=True)
    assert TOKENIZER.inner.decode(chat.header) == "<|im_start|>user\n"
    assert chat.before_answer == "<|im_end|>\n<|im_start|>assistant\n"
    assert plain == Form([], "\nAnswer: ")
    inner = byte_tokenizer()
    inner.chat_template = None
    assert form_for(Tokenizer(inner), plain=False) == plain


def test_what_cannot_be_asked_is_refused(monkeypatch):
    """A fact nearer than the question is long, and more facts than there are numbers."""
    with pytest.raises(ConfigError, match=r"distance of 90 tokens is too short: .* take 1\d\d;"):
        an_exam(distances=(90, 300))
    monkeypatch.setattr(streameval, "VALUES", range(10_000, 10_050))
    with pytest.raises(ConfigError, match="lower --distances or --questions"):
        an_exam()


# What counts as right


class Rememberer:
    """A stream that quotes what it holds: perfectly what is held, and else it guesses."""

    def __init__(self, loaded, config):
        self.config, self.ids = config, []

    def feed(self, ids):
        self.ids += ids

    def fork(self):
        copy = Rememberer(None, self.config)
        copy.ids = list(self.ids)
        return copy

    def snapshot(self):
        return list(self.ids)

    def restore(self, state):
        self.ids = list(state)

    def known(self):
        sinks, window = self.config.sink_size, self.config.window_size
        held = self.ids[:sinks] + self.ids[sinks:][-window:]
        text = TOKENIZER.decode(held)
        name = re.search(r"content of ([\w-]+) is$", text)[1]
        found = re.search(rf"line \d+: the register content of {name} is (\d+)\n", text)
        return found and found[1]

    def score(self, ids):
        value = TOKENIZER.decode(ids).strip()
        guess = random.Random(value).random() + 1
        self.feed(ids)
        del self.ids[len(self.ids) - len(ids) :]
        return [None, 0.0 if value == self.known() else guess]

    def generate(self, max_new_tokens, stop):
        yield TextDelta(f" {self.known() or '00000'}.")


@pytest.mark.parametrize("plain", [True, False])
def test_a_perfect_rememberer_knows_what_it_holds(monkeypatch, plain):
    """All of it up to the very edge of the window, and what lies beyond by chance only."""
    monkeypatch.setattr(streameval, "Stream", Rememberer)
    exam = an_exam((300, 900, 1020, 1500), 60, plain=plain)
    rows = scores(CACHE, list(take(None, CACHE, exam)))
    assert [row.distance for row in rows] == [300, 900, 1020, 1500]
    assert [row.held for row in rows] == ["yes", "yes", "no", "no"]
    assert [row.answered for row in rows] == [1, 1, 0, 0]
    assert [row.chosen for row in rows[:2]] == [1, 1]
    assert {row.num_questions for row in rows} == {60}
    # 120 guesses among five, three standard deviations.
    beyond = (rows[2].chosen + rows[3].chosen) / 2
    assert beyond == pytest.approx(rows[2].chosen_by_chance, abs=0.11)
    assert rows[0].chosen_by_chance == 0.2
    said = verdict(rows)
    assert said.startswith("sink: 100% answered and 100% chosen within the cache's length; 0% ")
    assert said.endswith("(by chance 0% and 20%)")


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        (" 48213.", True),
        ("It is 48213 and not 48214", True),
        (" 148213", False),
        (" 482130", False),
        (" 4821", False),
        ("", False),
    ],
)
def test_an_answer_holds_the_number_itself(text, is_right):
    question = streameval.Question(
        distance=9, ids=[3], start=0, value="48213", choices=[[4], [5]], right=1
    )
    fork = SimpleNamespace(
        feed=lambda ids: None,
        snapshot=lambda: None,
        restore=lambda state: None,
        score=lambda ids: [None, 1.5 if ids == [4] else 1.0],
        generate=lambda **options: iter([TextDelta(text[:3]), TextDelta(text[3:])]),
    )
    answer = streameval._ask(fork, question)
    assert answer == Answer(distance=9, text=text, is_right=is_right, is_chosen=True)


# With a model

SMALL = CacheConfig(sink_size=30, window_size=270)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_can_be_asked_and_asking_disturbs_nothing(loaded, policy, monkeypatch):
    """The stream is at its end what it is without questions."""
    exam = an_exam((200, 350), 2, cache=SMALL)
    (config,) = with_policies(SMALL, [policy], exam.num_tokens)
    streams = []

    class Watched(Stream):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            streams.append(self)

    monkeypatch.setattr(streameval, "Stream", Watched)
    rows = scores(config, list(take(loaded, config, exam)))
    assert [(row.distance, row.num_questions) for row in rows] == [(200, 2), (350, 2)]
    held = {"dense": ["yes", "yes"], "h2o": ["by head"] * 2, "snapkv": ["by head"] * 2}
    assert [row.held for row in rows] == held.get(policy, ["yes", "no"])
    alone = Stream(loaded, config)
    for ids, _ in exam.parts:
        alone.feed(ids)
    assert torch.equal(streams[0].logits, alone.logits)
    assert streams[0].position == alone.position


def test_a_dense_cache_ends_where_it_is_full(loaded):
    """And what was asked until then counts; with room for the whole exam it is asked all."""
    exam = an_exam((200, 350), 3, cache=SMALL)
    (whole,) = with_policies(SMALL, ["dense"], exam.num_tokens)
    assert len(list(take(loaded, whole, exam))) == 6
    (short,) = with_policies(SMALL, ["dense"], exam.num_tokens - 200)
    assert 0 < len(list(take(loaded, short, exam))) < 6


# The command

FLAGS = ("bench", "--streameval", "--window", "300", "--questions", "2", "--distances", "200,1.5x")


def test_the_command_is_deterministic_from_the_seed(command, tiny_folder):
    """Rows by policy and distance, as JSON and Markdown; another seed asks something else."""
    options = (*FLAGS, "-m", tiny_folder, "--policy", "sink,dense")
    result = command(*options, "-o", "json")
    assert result.code == 0, result.err
    rows = [json.loads(line) for line in result.out.splitlines()]
    # The header of the chat is pinned: 6 tokens in the place of 4 sinks.
    assert [(row["policy"], row["distance"]) for row in rows] == [
        ("sink", 200),
        ("sink", 459),
        ("dense", 200),
        ("dense", 459),
    ]
    assert {row["num_questions"] for row in rows} == {2}
    assert {row["chosen_by_chance"] for row in rows} == {0.2}
    assert "4 questions about a stream of" in result.err
    assert "caches of 306 tokens" in result.err
    assert "dense: 0% answered and" in result.err
    assert command(*options, "-o", "json").out == result.out
    table = command(*options, "--no-template")
    assert table.out.startswith("| policy | distance | in caches | held | questions | answered |")
    assert "caches of 304 tokens" in table.err


def test_ctrl_c_leaves_what_was_asked(command, tiny_folder, monkeypatch):
    """The rows so far, and the exit code of an interrupt; without any, nothing but that."""

    def some(loaded, config, exam):
        if config.policy == "window":
            yield Answer(distance=200, text="", is_right=False, is_chosen=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(streameval, "take", some)
    result = command(*FLAGS, "-m", tiny_folder, "--policy", "window,dense", "-o", "json")
    assert result.code == 130
    (row,) = result.out.splitlines()
    assert json.loads(row)["num_questions"] == 1
    assert "interrupted: these are the questions asked until then" in result.err
    nothing = command(*FLAGS, "-m", tiny_folder)
    assert (nothing.code, nothing.out) == (130, "")


def test_a_stream_beyond_the_trained_length_is_said(command, tiny_folder):
    """A dense cache asks no question about it, and has no row."""
    options = ("--questions", "1", "--distances", "200,4200", "--window", "300")
    options = ("bench", "--streameval", "-m", tiny_folder, *options, "--policy", "sink,dense")
    result = command(*options, "-o", "json")
    assert result.code == 0, result.err
    assert {json.loads(line)["policy"] for line in result.out.splitlines()} == {"sink"}
    assert "dense: full after 0 questions" in result.err


def test_distances_are_tokens_or_caches():
    assert parse_distances("2x, 300,0.25x,300", 1000) == [250, 300, 2000]


@pytest.mark.parametrize("text", ["", "x", "-5", "0", "0x", "nanx", "infx", "12.5", "300,,5", "5y"])
def test_other_distances_are_refused(text):
    with pytest.raises(UsageError, match="--distances must be numbers of tokens, or of caches"):
        parse_distances(text, 1000)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--streameval", "--distances", "near"), "--distances must be numbers"),
        (("--streameval", "--distances", "20"), "a distance of 20 tokens is too short"),
        (("--streameval", "--questions", "0"), "--questions"),
        (("--streameval", "--plot", "p.png"), "--plot belongs to --ppl or --sink-map"),
        (("--distances", "2x"), "--distances belongs to --streameval"),
        (("--questions", "3"), "--questions belongs to --streameval"),
        (("--streameval", "--ppl", "x.txt"), "--ppl and --streameval exclude each other"),
    ],
)
def test_what_cannot_be_done_is_said(command, tiny_folder, options, said):
    result = command("bench", "-m", tiny_folder, *options)
    assert (result.code, result.out) == (2, "")
    assert said in result.err
