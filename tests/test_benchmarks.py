"""The scripts in `benchmarks/`, on a tiny model: contenders that agree, figures that add up.

Contenders are held to a plain forward pass of transformers and to each other: one that holds fewer
tokens than it says, or runs another model, would make a comparison worthless and be seen nowhere.
Timings are only held to be there.
"""

import itertools
import math
import subprocess
import sys
from pathlib import Path

import bookkeeping
import common
import flat
import peers
import pretrain_sinks
import pytest
import recall
import roofline
import sink_map
import streameval
import tables
import torch
import workers
from oracles import SlowStream
from transformers import AutoModelForCausalLM
from transformers.cache_utils import StaticLayer

import streamchat

SIZE = 64
TEXT = "The sea was calm that night, and nobody on the pier had seen the ship come in. " * 12
HERE = ("streamchat", "dynamic", "static", "recompute")

# The benchmarks are for a current transformers; the package itself supports older ones, too.
pytestmark = pytest.mark.skipif(
    not hasattr(StaticLayer, "crop"), reason="this transformers cannot crop a static cache"
)


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def threads():
    """The scripts set torch's threads: what they were comes back."""
    before = torch.get_num_threads()
    yield 1
    torch.set_num_threads(before)


@pytest.fixture
def worker(tiny_folder, threads):
    def start(kind):
        options = {"quantize": "none"} if kind == "streamchat" else {}
        return workers.KINDS[kind](str(tiny_folder), threads, **options)

    return start


def ids_of_text(length):
    """What the byte tokenizer makes of the text: one id a byte."""
    return [3 + byte for byte in TEXT.encode()[:length]]


# Contenders


@pytest.mark.parametrize("kind", HERE)
def test_a_contender_runs_the_model_it_is_given(worker, tiny_folder, kind):
    """The probe is the surprise of the next token in a plain forward pass."""
    *ids, following = ids_of_text(33)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    with torch.no_grad():
        expected = -model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[following]
    found = workers.answer(worker(kind), {"do": "probe", "ids": ids, "next": following})["nll"]
    assert found == pytest.approx(float(expected), abs=1e-4)


@pytest.mark.parametrize("kind", HERE)
def test_every_decode_step_sees_as_many_keys_as_the_cache_has(worker, kind):
    """After filling, prefilling and many steps a query still sees exactly `size` keys."""
    contender = worker(kind)
    contender.open(SIZE, ids_of_text(SIZE + 40))
    for _ in range(2):
        contender.prefill(ids_of_text(20))
        report = contender.decode(3)
        assert report["keys"] == SIZE
        assert len(report["seconds"]) == 3
        assert all(second > 0 for second in report["seconds"])


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_dense_cache_is_as_it_was_after_a_measurement(worker, kind):
    """Taking tokens out again leaves what was held: the next step gives a plain pass's logits."""
    contender = worker(kind)
    ids = ids_of_text(SIZE)
    contender.open(SIZE, ids)
    contender.prefill(ids_of_text(20))
    contender.decode(4)
    found = contender.forward([ids[-1]], contender.for_decode)
    torch.testing.assert_close(found, contender.forward(ids, None), atol=1e-4, rtol=1e-4)
    contender.for_prefill.crop(-1)
    found = contender.forward([ids[-1]], contender.for_prefill)
    torch.testing.assert_close(found, contender.forward(ids, None), atol=1e-4, rtol=1e-4)


def test_recomputation_feeds_the_newest_tokens(worker, monkeypatch):
    """Each of its steps is a pass over the `size` newest ids, the one just chosen included."""
    contender = worker("recompute")
    contender.open(SIZE, ids_of_text(SIZE + 40))
    fed = []
    forward = contender.forward
    monkeypatch.setattr(
        contender, "forward", lambda ids, cache: (fed.append(list(ids)), forward(ids, cache))[1]
    )
    contender.decode(2)
    assert [len(ids) for ids in fed] == [SIZE, SIZE]
    assert fed[1][:-1] == fed[0][1:]


# peers.py


@pytest.fixture(scope="module")
def run_of_peers(tiny_folder, tmp_path_factory):
    """A whole run with one worker process."""
    folder = tmp_path_factory.mktemp("peers")
    text, output = folder / "text.txt", folder / "peers.csv"
    text.write_text(TEXT, encoding="utf-8")
    command = [sys.executable, str(common.ROOT / "benchmarks" / "peers.py"), str(text)]
    command += ["--model", str(tiny_folder), "--sizes", "32,64", "--rounds", "2", "--tokens", "3"]
    command += ["--chunk", "16", "--threads", "1", "--output", str(output)]
    command += ["--only", "streamchat", "--only", "attention_sinks", "--only", "llama.cpp"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done, common.read_csv(output)


def test_a_run_gives_a_row_for_each_size_and_measure(run_of_peers):
    """Every row says what was measured, with what, and where; its median lies in its range."""
    _, rows = run_of_peers
    kinds = [(row["contender"], row["cache_size"], row["measure"]) for row in rows]
    expected = [("streamchat", s, m) for s in ("32", "64") for m in (peers.DECODE, peers.PREFILL)]
    assert kinds == expected
    for row in rows:
        assert 0 < float(row["low"]) <= float(row["median"]) <= float(row["high"])
        assert row["keys"] == row["cache_size"]
        assert (row["dtype"], row["cache_dtype"]) == ("int8", "float32")
        assert row["torch"] == torch.__version__
        assert row["transformers"]
        assert row["device"]
        assert (row["threads"], row["seed"], row["rounds"]) == ("1", "0", "2")


def test_a_contender_without_its_environment_is_left_out_by_name(run_of_peers):
    """What is missing is said, with the option that would bring it; the table is for the rest."""
    done, _ = run_of_peers
    assert "left out: attention_sinks, for want of --sinks-python" in done.stderr
    assert "left out: llama.cpp, for want of --llama-python" in done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert "decode ms/token, 32" in lines[0]
    assert lines[2].startswith("| streamchat |  int8 / float32 |")


class FakeWorker:
    def __init__(self, name, weights, surprises):
        self.name, self.about, self.surprises = name, {"weights": weights}, surprises
        self.nll = surprises[0]

    def ask(self, what, **fields):
        assert what == "probe"
        return {"nll": self.surprises[0]}


@pytest.mark.parametrize(
    ("weights", "nll", "is_same"),
    [
        ("float32", 2.0001, True),
        ("float32", 2.01, False),
        ("float32", math.nan, False),
        ("Q4_1", 2.1, True),
        ("Q4_1", 2.4, False),
    ],
)
def test_another_model_is_refused(weights, nll, is_same):
    """A float32 contender must agree within rounding, another one within its precision."""
    fakes = {"a": FakeWorker("a", "float32", [2.0]), "b": FakeWorker("b", weights, [nll])}
    prompts = peers.Prompts(ids_of_text(100), 0)
    if is_same:
        peers.compare_weights(fakes, prompts)
    else:
        with pytest.raises(SystemExit, match="b is not the same model as a"):
            peers.compare_weights(fakes, prompts)


def test_prompts_are_pieces_of_the_text_and_the_seed_chooses_them():
    """Consecutive, wrapped round, of the length asked for; the same seed gives the same."""
    ids = list(range(50))
    for length in (1, 7, 50, 170):
        piece = peers.Prompts(ids, 3).take(length)
        assert len(piece) == length
        assert all((b - a) % 50 == 1 for a, b in itertools.pairwise(piece))
    takes = [[p.take(5) for _ in range(9)] for p in (peers.Prompts(ids, s) for s in (0, 0, 1))]
    assert takes[0] == takes[1] != takes[2]


def test_the_table_of_peers_has_ratios_to_streamchat():
    """Twice the time is 2.00x, half the rate 0.50x, and what was not measured is left empty."""

    def row(contender, measure, median):
        own = {"contender": contender, "measure": measure, "median": str(median)}
        return {**own, "cache_size": "256", "dtype": "int8", "cache_dtype": "float16"}

    text = peers.table(
        [
            row("streamchat", peers.DECODE, 10),
            row("streamchat", peers.PREFILL, 1000),
            row("other", peers.DECODE, 20),
            row("other", peers.PREFILL, 500),
            row("third", peers.DECODE, 5),
        ]
    )
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert cells[2] == ["streamchat", "int8 / float16", "10.0", "1,000"]
    assert cells[3] == ["other", "int8 / float16", "20.0 (2.00x)", "500 (0.50x)"]
    assert cells[4] == ["third", "int8 / float16", "5.0 (0.50x)", ""]


# pretrain_sinks.py

SINK_NAMES = ["vanilla", "zero sink", "learnable sink"]


def sink_arguments(folder, **options):
    """A tiny budget."""
    sizes = {"steps": 30, "batch": 2, "context": 16, "layers": 2, "hidden": 32, "vocab": 280}
    sizes |= {"tokens": 100, "threads": 1, "dtype": "float32", **options}
    sizes |= {"folder": folder / "models", "output": folder / "sinks.csv"}
    named = [str(part) for name, value in sizes.items() for part in (f"--{name}", value)]
    return [str(folder / "a.txt"), str(folder / "b.txt"), *named]


@pytest.fixture(scope="module")
def run_of_sinks(tmp_path_factory):
    """A whole run in a process of its own: its folder, and what it said."""
    folder = tmp_path_factory.mktemp("sinks")
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text(TEXT * 3, encoding="utf-8")
    script = str(common.ROOT / "benchmarks" / "pretrain_sinks.py")
    command = [sys.executable, script, *sink_arguments(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder, done


def sink_rows(folder, measure):
    rows = common.read_csv(folder / "sinks.csv")
    return [row for row in rows if row["measure"] == measure]


def sink_model(folder, name):
    """The folder of a variant's model."""
    [path] = (folder / "models").glob(f"{name.replace(' ', '-')}-*")
    return path


def test_three_models_learn_and_are_streamed(run_of_sinks):
    """The loss falls well below an equal guess; a perplexity for each size of cache."""
    folder, done = run_of_sinks
    assert "entropy of single tokens" in done.stderr
    losses = sink_rows(folder, "training loss")
    assert [row["variant"] for row in losses] == SINK_NAMES
    assert all(0 < float(row["value"]) < math.log(280) - 1 for row in losses)
    perplexities = sink_rows(folder, "perplexity")
    assert [(row["variant"], row["sinks"], row["window"]) for row in perplexities] == [
        (name, str(sinks), str(16 - sinks)) for name in SINK_NAMES for sinks in pretrain_sinks.SINKS
    ]
    assert {row["tokens"] for row in perplexities} == {"84"}
    shares = sink_rows(folder, "share of first token")
    assert [(row["variant"], row["layer"]) for row in shares] == [
        (name, layer) for name in SINK_NAMES for layer in "01"
    ]
    assert all(0 < float(row["value"]) < 1 for row in shares)
    assert [row["variant"] for row in sink_rows(folder, "share of zero key")] == ["zero sink"] * 2
    assert done.stdout.splitlines()[-1].startswith("| learnable sink |")


def test_what_is_trained_are_ordinary_model_folders(run_of_sinks):
    """Transformers opens them; what they were trained for is in their configurations."""
    folder, _ = run_of_sinks
    paths = [sink_model(folder, name) for name in SINK_NAMES]
    configs = [AutoModelForCausalLM.from_pretrained(path).config for path in paths]
    softmaxes = [config.streamchat_softmax for config in configs]
    assert softmaxes == ["standard", "off_by_one", "standard"]
    assert [config.max_position_embeddings for config in configs] == [16, 16, 17]


@pytest.mark.parametrize("number", [0, 2], ids=[SINK_NAMES[0], SINK_NAMES[2]])
@pytest.mark.parametrize("sinks", pretrain_sinks.SINKS)
def test_a_perplexity_is_that_of_the_slow_stream(run_of_sinks, threads, number, sinks):
    """Oracle B, for the text after the cache has filled; the learnable sink is fed once, first."""
    folder, _ = run_of_sinks
    variant = pretrain_sinks.VARIANTS[number]
    loaded = streamchat.load(
        str(sink_model(folder, variant.name)), device="cpu", quantize="none", check=False
    )
    ids = loaded.tokenizer.encode(TEXT)[:40]
    fed = [*[pretrain_sinks.SINK_ID][: int(variant.has_token)], *ids]
    log_likely = SlowStream(loaded.model, sinks, 16 - sinks).feed_all(fed[:-1]).log_softmax(-1)
    losses = [-float(row[token]) for row, token in zip(log_likely, fed[1:], strict=True)]
    perplexity, count = pretrain_sinks.streamed(loaded, variant, ids, sinks, 16 - sinks)
    assert count == 24
    assert perplexity == pytest.approx(math.exp(sum(losses[-24:]) / 24), rel=1e-4)


def test_a_share_is_that_of_transformers_own_weights(run_of_sinks, threads):
    """Of the vanilla model: what its eager attention reports."""
    folder, _ = run_of_sinks
    path = sink_model(folder, "vanilla")
    loaded = streamchat.load(str(path), device="cpu", quantize="none", check=False)
    ids = loaded.tokenizer.encode(TEXT)[:40]
    shares = pretrain_sinks.attention_shares(loaded, pretrain_sinks.VARIANTS[0], ids, 16)
    stock = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    with torch.no_grad():
        weights = stock(torch.tensor(ids[:32]).view(2, 16), output_attentions=True).attentions
    expected = [float(layer[:, :, 8:, 0].mean()) for layer in weights]
    assert shares == {"share of first token": pytest.approx(expected, abs=1e-6)}


def test_all_variants_start_alike_and_learn_from_the_same_tokens():
    """The same weights; in samples with a sink its own label and the first token's are left out."""
    args = pretrain_sinks.parse(sink_arguments(Path()))
    first, *others = (
        pretrain_sinks.new_model(variant, 281, args).state_dict()
        for variant in pretrain_sinks.VARIANTS
    )
    for other in others:
        assert all(torch.equal(tensor, other[name]) for name, tensor in first.items())
    texts = torch.tensor([[5, 6, 7]])
    plain, _, with_token = (pretrain_sinks.sample(texts, v) for v in pretrain_sinks.VARIANTS)
    assert [part.tolist() for part in plain] == [[[5, 6, 7]]] * 2
    assert [part.tolist() for part in with_token] == [[[0, 5, 6, 7]], [[-100, -100, 6, 7]]]


def test_a_finished_model_is_kept_and_other_settings_train_anew(run_of_sinks, threads, monkeypatch):
    """The figures come out the same; with another budget every model is trained."""
    folder, _ = run_of_sinks
    before = common.read_csv(folder / "sinks.csv")

    def refuse(variant, *args):
        raise RuntimeError(f"trained {variant.name}")

    monkeypatch.setattr(pretrain_sinks, "train", refuse)
    pretrain_sinks.main(sink_arguments(folder))
    assert common.read_csv(folder / "sinks.csv") == before
    with pytest.raises(RuntimeError, match="trained vanilla"):
        pretrain_sinks.main(sink_arguments(folder, steps=31))


def test_a_text_without_two_samples_held_out_is_refused(run_of_sinks, threads):
    """In one line, with the lengths."""
    folder, _ = run_of_sinks
    with pytest.raises(SystemExit, match=r"too short: [\d,]+ tokens to train on and 30 held out"):
        pretrain_sinks.main(sink_arguments(folder, tokens=30))


def test_the_picture_is_drawn_from_the_figures(run_of_sinks, tmp_path):
    """An SVG with each variant's name; needs matplotlib."""
    pytest.importorskip("matplotlib")
    folder, _ = run_of_sinks
    pretrain_sinks.plot(common.read_csv(folder / "sinks.csv"), tmp_path / "sinks.svg")
    assert "<svg" in (tmp_path / "sinks.svg").read_text(encoding="utf-8")


def test_a_picture_without_matplotlib_is_refused(monkeypatch, tmp_path):
    """In one line, with what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match=r"--plot needs matplotlib: pip install"):
        pretrain_sinks.plot([], tmp_path / "sinks.svg")


# The others


def test_bookkeeping_leaves_out_the_attention_and_nothing_else(monkeypatch):
    """A step of ours still writes its rows; attention is not called."""
    made = []
    original = bookkeeping.streamchat.SinkCache

    def making(*args, **kwargs):
        made.append(original(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(bookkeeping.streamchat, "SinkCache", making)
    attended = []
    monkeypatch.setattr("torch.Tensor.softmax", lambda *a, **k: attended.append(a))
    step = bookkeeping.ours(28, 2)
    [cache] = made
    position = cache.num_seen
    step()
    assert not attended
    assert cache.num_seen == position + 1
    assert not bool((cache.window_key(1, position) == 1).any())
    assert bool((cache.window_key(1, position - 1) == 1).all())


def test_bookkeeping_measures_all_caches_at_all_windows(tmp_path, threads, capsys):
    """A row for each, and a ratio at the end of each line."""
    output = tmp_path / "bookkeeping.csv"
    bookkeeping.main(
        [
            *["--windows", "16,64", "--rounds", "2", "--layers", "2", "--threads", "1", "--output"],
            str(output),
        ]
    )
    rows = common.read_csv(output)
    assert {(row["cache"], row["window"]) for row in rows} == {
        (name, window) for name in bookkeeping.NAMES for window in ("16", "64")
    }
    assert all(float(row["us_per_layer"]) > 0 for row in rows)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(bookkeeping.NAMES)
    assert all(line.endswith("x |") for line in lines[2:])


@pytest.mark.parametrize("name", bookkeeping.NAMES)
def test_bookkeeping_keeps_every_cache_full(name, monkeypatch):
    """After several steps a cache holds no more and no fewer tokens than before."""
    made = []

    def watch(owner, attribute):
        original = getattr(owner, attribute)

        def making(*args, **kwargs):
            made.append(original(*args, **kwargs))
            return made[-1]

        monkeypatch.setattr(owner, attribute, making)

    watch(bookkeeping.streamchat, "SinkCache")
    for layer in ("DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer"):
        watch(bookkeeping, layer)
    step = bookkeeping.MAKERS[name](28, 2)
    lengths = []
    for _ in range(3):
        assert step() > 0
        lengths.append([length_of(cache) for cache in made])
    assert lengths[0] == lengths[1] == lengths[2]
    assert set(lengths[0]) <= {31, 32}


def length_of(cache):
    if hasattr(cache, "num_held"):
        return cache.num_held
    if hasattr(cache, "max_cache_len"):
        return int(cache.get_seq_length())
    return cache.keys.shape[-2]


def test_the_roofline_adds_up(tiny_folder, tmp_path, threads, monkeypatch):
    """Share = bytes / bandwidth / time, in each row, and rows share the weights."""
    monkeypatch.setattr("streamchat.bench.roofline.read_bandwidth", lambda device: 2e9)
    monkeypatch.setattr(roofline, "numpy_bandwidth", lambda: 1e9)
    output = tmp_path / "roofline.csv"
    roofline.main(
        [
            *("--model", str(tiny_folder), "--output", str(output)),
            *["--sizes", "32", "--batch", "1,2", "--steps", "3", "--threads", "1"],
            *("--quantize", "none"),
        ]
    )
    one, two = common.read_csv(output)
    for row in (one, two):
        least = float(row["step_megabytes"]) * 1e6 / 2e9 * 1e3
        assert float(row["least_ms"]) == pytest.approx(least, rel=1e-4)
        assert float(row["share"]) == pytest.approx(least / float(row["step_ms"]), rel=1e-4)
    held, entry = 32 * 2 * 2 * 16 * 4, 64 * 4
    grown = float(two["step_megabytes"]) - float(one["step_megabytes"])
    assert grown * 1e6 == pytest.approx(held + entry, abs=2)


def test_numpy_reads_memory_too():
    """The check of the bandwidth is a plausible number of bytes per second."""
    assert 1e8 < roofline.numpy_bandwidth(1 << 24, 2) < 1e13


def test_flat_gives_its_three_ratios(tiny_folder, text_file, tmp_path, threads, monkeypatch):
    """The last tokens measured are the last of `times` caches, and a value is its two medians'."""
    ends = []
    original = flat.decode
    monkeypatch.setattr(flat, "decode", lambda s: (original(s), ends.append(s.position))[0])
    output = tmp_path / "flat.csv"
    flat.main(
        [
            *(str(text_file), "--model", str(tiny_folder), "--output", str(output)),
            *["--cache", "32", "--times", "3", "--count", "20", "--rounds", "4", "--threads", "1"],
        ]
    )
    rows = common.read_csv(output)
    assert [row["ratio"] for row in rows] == [
        "last / first, in turn",
        "last / first, apart",
        "eviction / none",
    ]
    for row in rows:
        expected = float(row["over_ms"]) / float(row["under_ms"])
        assert float(row["value"]) == pytest.approx(expected, rel=1e-4)
    assert max(ends) == 96
    assert min(ends) == 33


def test_flat_refuses_a_text_that_does_not_fill_the_cache(tiny_folder, text_file, tmp_path):
    """A cache that is not full would be measured as though it were."""
    with pytest.raises(SystemExit, match="is too short: 948 tokens"):
        flat.main([str(text_file), "--model", str(tiny_folder), "--cache", "2000"])


def test_recall_counts_what_it_planted(text_file, tmp_path):
    """All passages and 200 facts are logged; those asked for in their own words are found."""
    output = tmp_path / "recall.csv"
    recall.main([str(text_file), "--tokens", "2000", "--output", str(output)])
    own, other = common.read_csv(output)
    assert (own["facts"], other["facts"]) == ("100", "100")
    assert int(own["passages"]) == 200 + int(2000 * recall.CHARS_PER_TOKEN / recall.PASSAGE_CHARS)
    assert float(own["first_three"]) >= 0.95
    assert float(own["first"]) <= float(own["first_three"])
    assert float(other["first_three"]) < float(own["first_three"])


def test_the_page_of_sessions_shows_what_the_result_holds():
    """Its table is the one that the CSV file makes."""
    rows = common.read_csv(common.RESULTS / "recall.csv")
    page = common.ROOT / "docs" / "sessions.md"
    assert recall.table(rows) in page.read_text(encoding="utf-8")


def test_streameval_writes_a_row_for_each_policy_and_distance(tiny_folder, threads, tmp_path):
    """And a table with chance beside it."""
    path = tmp_path / "streameval.csv"
    options = ["--cache", "300", "--policies", "sink,dense", "--distances", "200,1.5x"]
    options += ["--questions", "1", "--threads", "1", "--output", str(path)]
    streameval.main([*options, "--model", str(tiny_folder)])
    rows = common.read_csv(path)
    assert [(row["policy"], row["distance"]) for row in rows] == [
        ("sink", "200"),
        ("sink", "453"),
        ("dense", "200"),
        ("dense", "453"),
    ]
    assert {row["cache_size"] for row in rows} == {"302"}
    text = streameval.table(rows)
    assert text.startswith("| answered / chosen, cache 302 | 200 (0.66x) | 453 (1.5x) |")
    assert "| by chance                    |    0% / 20% |   0% / 20% |" in text


def test_sink_map_writes_its_figures(tiny_folder, threads, text_file, tmp_path):
    """By layer and head, and a table by number of first tokens."""
    path = tmp_path / "sink_map.csv"
    options = ["--cache", "64", "--threads", "1", "--output", str(path)]
    sink_map.main([str(text_file), *options, "--model", str(tiny_folder)])
    rows = common.read_csv(path)
    assert len(rows) == 4 * 4 + 4 + 5
    assert {row["cache_size"] for row in rows} == {"64"}
    shares = [
        float(r["value"]) for r in rows if (r["measure"], r["num_first"]) == ("attention", "8")
    ]
    lines = sink_map.table(rows).splitlines()
    assert [cell.strip() for cell in lines[0].split("|")[2:-1]] == ["0", "1", "2", "4", "8"]
    assert f" {sum(shares) / 4:.0%} " in lines[2]
    assert f" {max(shares):.0%} " in lines[3]


# Tables and helpers


def test_the_readme_shows_what_the_results_hold():
    """Every table of the README is the one that its CSV file makes."""
    assert tables.main(["--check"]) == 0


def test_tables_are_written_between_their_marks(tmp_path):
    """Only what stands between marks changes; --check tells before, and is content after."""
    readme, results = tmp_path / "README.md", tmp_path / "results"
    places = "".join(f"<!-- table: {n} -->\nold\n<!-- end -->\n\n" for n in tables.TABLES)
    readme.write_text(f"# Head\n\n{places}tail\n", encoding="utf-8")
    row = {"ratio": "last / first", "value": 1.0123, "over_ms": 2.0, "under_ms": 3.0}
    row |= {"cache_size": 1024, "torch": "2", "transformers": "5", "device": "CPU"}
    common.write_csv(results / "flat.csv", [{**row, "threads": 2, "commit": "abc"}])
    where = ["--readme", str(readme), "--results", str(results)]
    assert tables.main([*where, "--check"]) == 1
    assert "old" in readme.read_text(encoding="utf-8")
    assert tables.main(where) == 0
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("# Head\n\n<!-- table: peers -->\n(No figures yet.)\n<!-- end -->\n")
    assert text.endswith("<!-- end -->\n\ntail\n")
    assert "1.012" in text
    assert "CPU, 2 threads; torch 2, transformers 5; commit abc." in text
    assert "old" not in text
    assert tables.main([*where, "--check"]) == 0


def test_a_readme_without_a_place_for_a_table_is_an_error(tmp_path):
    """A table that is shown nowhere is not passed over."""
    readme = tmp_path / "README.md"
    readme.write_text("<!-- table: peers -->\n<!-- end -->\n", encoding="utf-8")
    missing = "no place for table bookkeeping, flat, live, long_stream, long_tiny, policies, "
    missing += "policies-speed, pretrain_sinks"
    with pytest.raises(SystemExit, match=missing):
        tables.main(["--readme", str(readme), "--check"])


def test_measurements_are_taken_in_turn_and_each_round_starts_elsewhere():
    """Every contender once a round, none always first."""
    called = []
    works = {name: lambda n=name: called.append(n) or len(called) for name in "abc"}
    taken = common.interleaved(works, 3)
    assert "".join(called) == "abcbcacab"
    assert taken == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}


def test_where_a_figure_was_taken_is_told_without_naming_the_machine():
    """Commit, versions, processor, dtype, threads and seed; no host, user or path."""
    where = common.environment(threads=2, dtype="float32")
    assert set(where) == {
        "commit",
        "python",
        "torch",
        "transformers",
        "device",
        "dtype",
        "threads",
        "seed",
    }
    assert where["torch"] == torch.__version__
    assert where["device"]
    assert not any(str(Path.home()) in str(value) for value in where.values())


def test_rows_come_back_from_csv_as_they_went(tmp_path):
    """Commas and quotes survive; floats keep six digits."""
    path = tmp_path / "deep" / "rows.csv"
    common.write_csv(path, [{"name": 'a, "b"', "value": 1 / 3, "count": 7}])
    assert common.read_csv(path) == [{"name": 'a, "b"', "value": "0.333333", "count": "7"}]
    assert path.read_text(encoding="utf-8").count("\n") == 2


def test_an_option_this_version_lacks_is_refused_by_name(monkeypatch):
    """Asking for a precision that `load` does not know ends the script; not asking does not."""
    assert common.load_options(None) == {}
    monkeypatch.setattr("streamchat.load", lambda name=None: None)
    with pytest.raises(SystemExit, match="no quantize"):
        common.load_options("none")
    monkeypatch.setattr("streamchat.load", lambda name=None, quantize="auto": None)
    assert common.load_options("none") == {"quantize": "none"}
