"""`bench --ppl`: the numbers of a plain forward pass, kept runs, what it says when it cannot."""

import json
import math
import signal
import sys
import time
from dataclasses import replace

import pexpect
import pytest
import torch
from conftest import random_ids

from streamchat import CacheConfig, ConfigError
from streamchat.bench import perplexity as bench
from streamchat.bench.perplexity import stream_text, summarize, with_policies
from streamchat.config import POLICIES

CACHE = CacheConfig(sink_size=4, window_size=28)
IDS = random_ids(300)[0].tolist()


def timeless(rows):
    """Segments without what depends on the moment."""
    return [replace(row, seconds=1.0, memory_megabytes=0.0) for row in rows]


def test_dense_is_a_plain_forward_pass(loaded):
    """Summed by segment or not, it is the mean over all tokens but the first."""
    (config,) = with_policies(CACHE, ["dense"], len(IDS))
    rows = list(stream_text(loaded, config, IDS, segment=64))
    with torch.no_grad():
        logits = loaded.model(torch.tensor([IDS]), use_cache=False).logits[0]
    losses = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(IDS[1:]), reduction="none")
    summary = summarize(config, rows, len(IDS))
    assert summary.perplexity == pytest.approx(losses.mean().exp().item(), rel=1e-4)
    assert summary.num_tokens == len(IDS) - 1
    assert [row.position for row in rows] == [0, 64, 128, 192, 256]
    assert rows[1].nats == pytest.approx(losses[63:127].sum().item(), rel=1e-4)
    assert summary.perplexity_at_end == pytest.approx(losses[255:].mean().exp().item(), rel=1e-4)


def test_all_policies_are_compared_on_the_same_tokens(loaded):
    """Where a dense cache ends sooner, the others are also summed up to there."""
    runs = {}
    for config in with_policies(CACHE, POLICIES, 128):
        runs[config.policy] = config, list(stream_text(loaded, config, IDS, segment=64))
    assert sum(row.num_tokens for row in runs["dense"][1]) == 127
    by_policy = {name: summarize(config, rows, 128) for name, (config, rows) in runs.items()}
    early = [row for row in runs["sink"][1] if row.position < 128]
    assert by_policy["sink"].perplexity_of_common == bench.mean_perplexity(early)
    assert by_policy["sink"].perplexity != by_policy["sink"].perplexity_of_common
    assert by_policy["dense"].perplexity == by_policy["dense"].perplexity_of_common
    # Nothing has been evicted in the first segment's first 32 tokens only.
    assert len({round(summary.perplexity, 6) for summary in by_policy.values()}) == 6
    work = {name: summary.work_per_token for name, summary in by_policy.items()}
    assert work.pop("recompute") == pytest.approx((32 + 268 * 32) / 300)
    assert set(work.values()) == {1.0}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_that_was_interrupted_goes_on_with_the_same_numbers(
    loaded, policy, tmp_path, monkeypatch
):
    """Whenever it stopped: what came after the last saved state is computed again."""
    monkeypatch.setattr(bench, "SECONDS_BETWEEN_SAVES", 0.0)
    (config,) = with_policies(CACHE, [policy], len(IDS))
    whole = list(stream_text(loaded, config, IDS, segment=64))
    run = stream_text(loaded, config, IDS, segment=64, folder=tmp_path)
    for _ in range(3):
        next(run)
    monkeypatch.setattr(bench._Kept, "save", lambda self: None)  # a crash saves nothing
    next(run)
    run.close()
    monkeypatch.undo()
    run = stream_text(loaded, config, IDS, segment=64, folder=tmp_path)
    for _ in range(4):
        next(run)
    run.close()
    again = list(stream_text(loaded, config, IDS, segment=64, folder=tmp_path))
    assert timeless(again) == timeless(whole)
    assert timeless(stream_text(loaded, config, IDS, segment=64, folder=tmp_path)) == timeless(
        whole
    )


def test_the_run_of_another_text_is_not_gone_on_with(loaded, tmp_path):
    list(stream_text(loaded, CACHE, IDS, folder=tmp_path))
    with pytest.raises(ConfigError, match=r"holds another run: text was .*another folder"):
        list(stream_text(loaded, CACHE, IDS[1:], folder=tmp_path))


# The command


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("A line of text that says little.\n" * 60, encoding="utf-8")
    return path


def test_the_command_writes_a_row_for_each_policy(command, tiny_folder, text_file):
    """Tables, JSON and CSV hold the same; what ends early is said."""
    options = ("bench", "--ppl", text_file, "-m", tiny_folder, "--window", "60")
    names = "sink,dense,window,recompute,h2o,snapkv"
    result = command(*options, "--policy", names, "--limit", "500", "-o", "json")
    assert result.code == 0, result.err
    rows = [json.loads(line) for line in result.out.splitlines()]
    assert [row["policy"] for row in rows] == names.split(",")
    assert {row["num_tokens"] for row in rows} == {499}
    assert all(math.isfinite(row["perplexity"]) for row in rows)
    assert rows[0]["cache_megabytes"] == rows[2]["cache_megabytes"]
    table = command(*options, "--limit", "500")
    assert table.out.splitlines()[0].startswith("| policy | tokens | perplexity |")
    assert "caches of 64 tokens" in table.err


def test_a_dense_cache_ends_where_the_model_was_trained_to(command, tiny_folder, tmp_path):
    text = tmp_path / "long.txt"
    text.write_text("word " * 1000, encoding="utf-8")
    result = command("bench", "--ppl", text, "-m", tiny_folder, "--policy", "dense,sink")
    assert result.code == 0, result.err
    assert "dense: ended after 4,096 tokens, full" in result.err


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_plots(command, tiny_folder, text_file, tmp_path, suffix):
    """A picture of the kind that its name says."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"plot.{suffix}"
    options = ("-m", tiny_folder, "--window", "60", "--policy", "sink,window", "--plot", picture)
    result = command("bench", "--ppl", text_file, *options)
    assert result.code == 0, result.err
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    assert picture.read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--ppl", "nowhere.txt"), 2, "no such file: nowhere.txt"),
        (("--limit", "100"), 2, "--limit belongs to --ppl or --sink-map"),
        (("--policy", "sink,fifo"), 2, "--policy must be some of sink, window"),
        (("--ppl", "{file}", "--plot", "picture.txt"), 2, "--plot must end in .png"),
        (("--ppl", "{file}", "--plot", "no/such/p.png"), 2, "no such folder: no/such"),
        (("--ppl", "{empty}"), 2, "has 0 tokens; perplexity needs at least 2"),
    ],
)
def test_what_cannot_be_done_is_said(
    command, tiny_folder, text_file, tmp_path, options, code, said
):
    (tmp_path / "empty.txt").touch()
    options = [o.format(file=text_file, empty=tmp_path / "empty.txt") for o in options]
    result = command("bench", "-m", tiny_folder, *options)
    assert (result.code, result.out) == (code, "")
    assert said in result.err


def test_speed_by_policy(command, tiny_folder):
    """One row for each policy and depth; a dense cache that is full is left out, and said."""
    sizes = ("--tokens", "3", "--prefill", "40", "-r", "1", "--window", "60", "--depth", "1,64")
    names = "sink,dense,recompute,h2o,snapkv"
    result = command("bench", "-m", tiny_folder, *sizes, "--policy", names, "-o", "json")
    assert result.code == 0, result.err
    rows = [json.loads(line) for line in result.out.splitlines()]
    depths = {name: [r["depth"] for r in rows if r["policy"] == name] for name in names.split(",")}
    assert depths.pop("dense") == [1]
    assert all(depths == [1, 64] for depths in depths.values())
    assert "dense: full before depth 64x" in result.err


def test_ctrl_c_keeps_the_run(tiny_folder, tmp_path):
    """The real program: interrupted in the middle, it goes on from there."""
    text, folder = tmp_path / "long.txt", tmp_path / "run"
    text.write_text("some words that go on and on\n" * 20_000, encoding="utf-8")
    arguments = ["-m", "streamchat", "bench", "--ppl", str(text), "-m", str(tiny_folder)]
    arguments += ["--window", "60", "--keep", str(folder), "--policy", "window"]
    child = pexpect.spawn(sys.executable, arguments, encoding="utf-8", timeout=90)
    rows = folder / "window-0+64.jsonl"
    deadline = time.monotonic() + 90
    while not (rows.is_file() and rows.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    child.kill(signal.SIGINT)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    assert "Traceback" not in child.before
    assert all(json.loads(line)["policy"] == "window" for line in rows.read_text().splitlines())
    assert (folder / "window-0+64.safetensors").is_file()
