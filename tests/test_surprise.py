"""Standard scores against running means, thresholds, and a filter of lines by either."""

import json
import math
import random
import statistics
from dataclasses import replace

import pytest
import torch
from conftest import byte_tokenizer, tiny_model
from test_notes import reader_of

from streamchat import CacheConfig, Stream, UsageError
from streamchat.events import LineScored, Progress
from streamchat.model.load import LoadedModel, Source
from streamchat.model.tokenizer import Tokenizer
from streamchat.pipe import scorer as scorer_module
from streamchat.pipe import surprise
from streamchat.pipe.place import Place
from streamchat.pipe.score import score
from streamchat.pipe.scorer import Scorer
from streamchat.pipe.surprise import FEWEST, HORIZON, RunningMean, Threshold, parse_threshold

SIZES = CacheConfig(sink_size=4, window_size=60)


@pytest.fixture(scope="module")
def loaded():
    tokenizer = Tokenizer(byte_tokenizer())
    model = tiny_model(num_layers=1, vocab_size=272)
    return LoadedModel(Source("tiny", "tiny"), model, tokenizer, frozenset({2}))


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def never():
    return False


def line(**fields):
    values = {"line": 1, "part": 1, "ends_line": True, "text": "x", "position": 0}
    values |= {"num_tokens": 2, "num_scored": 2, "nats": 5.0}
    return LineScored(**{**values, **fields})


# The running mean


def test_up_to_the_horizon_it_is_the_plain_mean_and_deviation():
    """Each standard score is what the statistics module says of all values before it."""
    generator = random.Random(0)
    values = [generator.gauss(3, 2) for _ in range(HORIZON)]
    usual = RunningMean()
    for count, value in enumerate(values):
        own = usual.z_score(value)
        if count < FEWEST:
            assert own is None
        else:
            before = values[:count]
            expected = (value - statistics.fmean(before)) / statistics.pstdev(before)
            assert own == pytest.approx(expected, rel=1e-9)
        usual.add(value)


def test_beyond_the_horizon_old_values_fade(monkeypatch):
    """The weights of a plain mean decay by 1 - 1/N for each value that comes after."""
    monkeypatch.setattr(surprise, "HORIZON", 20)
    generator = random.Random(1)
    values = [generator.gauss(0, 1) for _ in range(200)]
    usual = RunningMean()
    weights = []
    for value in values:
        count = min(len(weights) + 1, 20)
        weights = [weight * (1 - 1 / count) for weight in weights] + [1 / count]
        usual.add(value)
    mean = math.fsum(w * v for w, v in zip(weights, values, strict=True))
    variance = math.fsum(w * (v - mean) ** 2 for w, v in zip(weights, values, strict=True))
    assert usual.z_score(5.0) == pytest.approx((5.0 - mean) / math.sqrt(variance), rel=1e-9)


def test_what_is_always_the_same_has_no_standard_score():
    """Without variance there is none, and no division by nothing."""
    usual = RunningMean()
    for _ in range(50):
        usual.add(0.1)
    assert usual.z_score(0.1) is None
    assert usual.z_score(9.0) is None


def test_it_goes_on_from_what_was_packed():
    """Through JSON and back, the next score is the same to the last bit."""
    usual, other = RunningMean(), RunningMean()
    for value in (0.3, 1.7, 2.2, 0.1, 5.5, 1e-9, 3.0, 0.2, 0.9):
        usual.add(value)
    other.unpack(json.loads(json.dumps(usual.pack())))
    assert other.z_score(2.5) == usual.z_score(2.5)


# Thresholds


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4.5", Threshold(4.5)),
        (" 0 ", Threshold(0.0)),
        ("-1sd", Threshold(-1.0, is_standard=True)),
        ("2 sd", Threshold(2.0, is_standard=True)),
    ],
)
def test_thresholds_as_users_write_them(text, expected):
    """A number is nats per token; `sd` makes it standard deviations."""
    assert parse_threshold(text) == expected


@pytest.mark.parametrize("text", ["", "sd", "much", "nan", "inf", "2sdsd", "1e999"])
def test_other_thresholds_are_refused(text):
    """In words that say what is allowed and what was got."""
    with pytest.raises(UsageError, match="--min must be nats per token"):
        parse_threshold(text)


def test_a_line_passes_from_its_threshold_on():
    """The threshold itself passes; what has no score does not."""
    assert Threshold(2.5).passes(line())
    assert not Threshold(2.51).passes(line())
    assert not Threshold(0.0).passes(line(num_scored=0, nats=0.0))
    assert Threshold(1.0, is_standard=True).passes(line(z_score=1.0))
    assert not Threshold(1.0, is_standard=True).passes(line(z_score=0.99))
    assert not Threshold(-9.0, is_standard=True).passes(line())


# Scored streams


def scored(scorer, data, tmp_path, **options):
    with reader_of(data, tmp_path, **options) as reader:
        return [e for e in scorer.run(reader, never) if isinstance(e, LineScored)]


TEXT = "".join(f"line {n}{' odd' * (n % 7 == 0)}\n" for n in range(40))


def test_scores_stay_as_they_were_and_have_standard_scores_beside_them(loaded, tmp_path):
    """Nats are those of `score`; each standard score is that of the lines before it."""
    found = scored(Scorer(Stream(loaded, SIZES)), TEXT + "\n  \n", tmp_path)
    with reader_of(TEXT + "\n  \n", tmp_path) as reader:
        plain = [e for e in score(Stream(loaded, SIZES), reader, never) if type(e) is LineScored]
    assert [replace(event, z_score=None) for event in found] == plain
    own = [event.nats_per_token for event in plain]
    for count, event in enumerate(found):
        if count < FEWEST or not event.text.strip():  # blank lines neither have one nor count
            assert event.z_score is None
        else:
            mean, spread = statistics.fmean(own[:count]), statistics.pstdev(own[:count])
            assert event.z_score == pytest.approx((own[count] - mean) / spread, rel=1e-6)


@pytest.mark.parametrize("name", ["nats_per_token", "z_score"])
def test_a_filter_passes_exactly_the_lines_that_reach_it(loaded, tmp_path, name):
    """The stream is fed with all of them: the scores are those without a filter."""
    everything = scored(Scorer(Stream(loaded, SIZES)), TEXT, tmp_path)
    values = [value for event in everything if (value := getattr(event, name)) is not None]
    threshold = Threshold(statistics.median(values), is_standard=name == "z_score")
    passed = scored(Scorer(Stream(loaded, SIZES), threshold), TEXT, tmp_path)
    assert passed == [event for event in everything if threshold.passes(event)]
    assert 0 < len(passed) < len(everything)


def test_a_filter_judges_long_lines_as_a_whole(loaded, tmp_path):
    """Its parts are held until the line ends; the text comes out in one piece."""
    data = "short\n" + "word " * 60 + "\nshort again\n"
    parts = scored(Scorer(Stream(loaded, SIZES)), data, tmp_path, max_piece_chars=64)
    assert len(parts) > 5
    whole = scored(Scorer(Stream(loaded, SIZES), Threshold(0)), data, tmp_path, max_piece_chars=64)
    assert [event.text for event in whole] == ["short", "word " * 60, "short again"]
    long = [part for part in parts if part.line == 2]
    assert whole[1].nats == pytest.approx(sum(part.nats for part in long))
    assert whole[1].num_tokens == sum(part.num_tokens for part in long)
    assert (whole[1].part, whole[1].ends_line, whole[1].position) == (1, True, long[0].position)


def test_a_filter_takes_no_memory_for_a_line_without_end(loaded, tmp_path, monkeypatch):
    """What is longer than a turn may be is judged in several pieces; no text is lost."""
    monkeypatch.setattr(scorer_module, "MAX_TURN_CHARS", 100)
    scorer = Scorer(Stream(loaded, SIZES), Threshold(0))
    found = scored(scorer, "x" * 1000 + "\n", tmp_path, max_piece_chars=32)
    assert len(found) > 5
    assert "".join(event.text for event in found) == "x" * 1000


@pytest.mark.parametrize("threshold", [None, Threshold(5.7), Threshold(0.0, is_standard=True)])
def test_going_on_from_any_batch_gives_the_same_lines(loaded, tmp_path, threshold):
    """A run that is left at a batch and gone on with is the undisturbed one, bit for bit."""
    data = TEXT + "a long line " * 30 + "\nend\n"
    options = {"max_piece_chars": 40}

    def scorer():
        return Scorer(Stream(loaded, SIZES, chunk_size=16), threshold)

    whole = scored(scorer(), data, tmp_path, **options)
    for left_at in (1, 7, 30):
        first, place = scorer(), Place()
        before, count = [], 0
        with reader_of(data, tmp_path, **options) as reader:
            for event in first.run(reader, never, place):
                if isinstance(event, Progress):
                    count += 1
                    if count == left_at:
                        break
                else:
                    before.append(event)
        packed, state = json.loads(json.dumps(first.pack())), first.stream.snapshot()
        second = scorer()
        second.unpack(packed)
        second.stream.restore(state)
        with reader_of(data, tmp_path, **options) as reader:
            pieces = reader.get(10)
            reader.give_back(pieces[place.num_pieces :])
            rest = [e for e in second.run(reader, never) if isinstance(e, LineScored)]
        assert before + rest == whole
