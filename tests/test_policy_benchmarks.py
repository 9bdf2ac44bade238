"""`benchmarks/policies.py` and `benchmarks/long_stream.py`, on a tiny model."""

import math

import long_stream
import policies
import pytest
import torch
from common import read_csv

from streamchat import CacheConfig, Stream, load
from streamchat.bench.perplexity import mean_perplexity, stream_text


@pytest.fixture
def threads():
    """The benchmarks set torch's threads; as it was afterwards."""
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    lines = [f"Line {i} has {i * i} words, or so it says." for i in range(60)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tiny(tiny_folder):
    return load(str(tiny_folder), device="cpu", quantize="none", check=False)


def options_of(tiny_folder, text_file, tmp_path, threads):
    options = [text_file, "--model", tiny_folder, "--quantize", "none", "--threads", threads]
    return [str(option) for option in [*options, "--output", tmp_path]]


def test_perplexities_of_all_policies(tiny_folder, tiny, text_file, tmp_path, threads):
    """Each is that of a stream of its own; the samples of both kinds are the same tokens."""
    sizes = ["--caches", "16,32", "--tokens", "2200", "--scored-tokens", "200"]
    sizes += ["--samples", "3", "--sample-tokens", "4"]
    policies.main([*options_of(tiny_folder, text_file, tmp_path, threads), *sizes])
    rows = read_csv(tmp_path / "policies.csv")
    names = ["sink", "window", "h2o", "snapkv", "recompute"]
    assert [row["policy"] for row in rows] == [*names, *names, "sink", "sink", "sink", "dense"]
    assert [row["sink_size"] for row in rows[10:]] == ["1", "2", "8", "0"]
    ids = tiny.tokenizer.encode(text_file.read_text(encoding="utf-8"))
    for row in rows[:4]:
        sinks = 4 if row["policy"] == "sink" else 0
        config = CacheConfig(sink_size=sinks, window_size=16 - sinks, policy=row["policy"])
        expected = mean_perplexity(stream_text(tiny, config, ids[: int(row["tokens"])]))
        assert float(row["perplexity"]) == pytest.approx(expected, rel=1e-4)
    sampled = rows[9]
    assert (sampled["policy"], sampled["sampled_tokens"]) == ("recompute", "8")
    stream = Stream(tiny, CacheConfig(sink_size=4, window_size=28))
    losses = stream.score(ids[:2200])
    starts = [1024, 2048]
    chosen = [loss for start in starts for loss in losses[start : start + 4]]
    expected = math.exp(sum(chosen) / len(chosen))
    assert float(sampled["sink_on_sample"]) == pytest.approx(expected, rel=1e-4)
    with torch.no_grad():
        windows = [ids[start + i - 32 : start + i] for start in starts for i in range(4)]
        logits = tiny.model(torch.tensor(windows), use_cache=False).logits[:, -1]
    targets = torch.tensor([ids[start + i] for start in starts for i in range(4)])
    own = torch.nn.functional.cross_entropy(logits, targets).exp().item()
    assert float(sampled["perplexity"]) == pytest.approx(own, rel=1e-4)
    table = policies.table(
        [{**row, "perplexity_16384": row["perplexity"], "tokens": row["tokens"]} for row in rows]
    )
    for name in (*names, "S = 8", "dense"):
        assert name in table


def test_speeds_of_all_policies(tiny_folder, text_file, tmp_path, threads):
    """A row for each policy and size, its cache full, a dense one longer than that."""
    sizes = ["--caches", "16,32", "--speed", "--decode-tokens", "3"]
    policies.main([*options_of(tiny_folder, text_file, tmp_path, threads), *sizes])
    rows = read_csv(tmp_path / "policies-speed.csv")
    held = {(row["policy"], row["cache_size"]): int(row["held"]) for row in rows}
    assert len(rows) == len(held)
    bounded = {key for key in held if key[0] not in ("dense", "snapkv")}
    assert all(held[key] == int(key[1]) for key in bounded)
    assert all(float(row["decode_ms"]) > 0 for row in rows)
    assert "`h2o`" in policies.speed_table(rows)


def test_a_long_stream_reads_its_text_again(tiny_folder, tiny, text_file, tmp_path, threads):
    """Rows cover it all, the angles at its end are exact, and a kept run goes on."""
    options = options_of(tiny_folder, text_file, tmp_path, threads)
    options += ["--tokens", "6000", "--cache", "32", "--keep", str(tmp_path / "kept")]
    options += ["--samples", "2"]
    long_stream.main(options)
    rows = read_csv(tmp_path / "long_stream.csv")
    assert [int(row["position"]) for row in rows] == list(range(0, 6000, 1024))
    assert sum(int(row["tokens"]) for row in rows) == 5999
    assert float(rows[0]["logit_error_at_end"]) < 1e-5
    sampled = [int(row["position"]) for row in rows if row["sampled_tokens"] == "32"]
    assert sampled == [1024, 5120]
    stream = Stream(tiny, CacheConfig(sink_size=4, window_size=28))
    ids = long_stream.tokens_of(tiny, text_file, 6000)
    losses = stream.score(ids)
    assert float(rows[-1]["sink_nats"]) == pytest.approx(sum(losses[5120:5152]), rel=1e-4)
    with torch.no_grad():
        windows = torch.tensor([ids[end - 32 : end] for end in range(5120, 5152)])
        logits = tiny.model(windows, use_cache=False).logits[:, -1]
    targets = torch.tensor(ids[5120:5152])
    own = torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
    assert float(rows[-1]["recompute_nats"]) == pytest.approx(own, rel=1e-4)
    assert {row["time_ratio_at_end"] for row in rows} != {""}
    table = long_stream.table(rows)
    assert "on 64 tokens sampled in 2 places" in table
    assert "| all         |  4,976 |" in table
    long_stream.main(options)
    again = read_csv(tmp_path / "long_stream.csv")
    timed = {"time_ratio_at_end"}
    assert [{k: v for k, v in row.items() if k not in timed} for row in again] == [
        {k: v for k, v in row.items() if k not in timed} for row in rows
    ]
    ids = long_stream.tokens_of(tiny, text_file, 6000)
    lines = text_file.read_text(encoding="utf-8").splitlines(keepends=True)
    own = [i for line in lines for i in tiny.tokenizer.encode(line)]
    start = tiny.tokenizer.bos_ids()
    assert ids == [*start, *own * 3][:6000]
