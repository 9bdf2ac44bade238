"""An honest bench: what is measured, when, and that the arithmetic is right.

Rates are held against a clock that only the model's own steps move, so they are exact: 1 ms for a
token of a chunk, 10 ms for a token alone.
"""

import csv
import io
import json
import statistics
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamchat import CacheConfig, ConfigError
from streamchat.bench import measure as bench
from streamchat.bench import roofline
from streamchat.bench.measure import BenchConfig, BenchRow, measure, percentile, verdict
from streamchat.cli.app import run
from streamchat.model.prepare import forward

BANDWIDTH = 2e9
CHUNK_TOKEN_SECONDS, SINGLE_TOKEN_SECONDS = 0.001, 0.01


def config(**overrides):
    fields = {
        "cache": CacheConfig(sink_size=4, window_size=28),
        "depths": [1, 3],
        "batch_size": 1,
        "prefill_tokens": 300,
        "decode_tokens": 5,
        "repeats": 2,
        "seed": 0,
    }
    fields |= overrides
    return BenchConfig(**{"budget": fields["cache"].cache_size, **fields})


def silent(_message):
    """Progress that nobody reads."""


@pytest.fixture
def steps(monkeypatch):
    """The forward passes of a bench, under a clock that only they move."""
    seen, now = [], SimpleNamespace(seconds=0.0)

    def timed(model, ids, cache, *args):
        seen.append(
            SimpleNamespace(
                batch_size=ids.shape[0],
                num_tokens=ids.shape[1],
                num_held=cache.num_held,
                position=cache.num_seen,
                ids=ids,
            )
        )
        now.seconds += (
            SINGLE_TOKEN_SECONDS if ids.shape[1] == 1 else CHUNK_TOKEN_SECONDS * ids.shape[1]
        )
        return forward(model, ids, cache, *args)

    monkeypatch.setattr(bench, "forward", timed)
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: now.seconds))
    return seen


# What is measured


def test_there_is_a_row_for_each_depth_at_its_place_in_the_stream(loaded, steps):
    """Rows come in ascending depth, each exactly that many cache sizes into the stream."""
    rows = list(measure(loaded, config(depths=[99, 1, 3]), silent))
    assert [row.depth for row in rows] == [1, 3, 99]
    # Neither the warm-up nor what is measured at 1x, which is more than 3x, is in the stream.
    assert [row.position for row in rows] == [32, 3 * 32, 99 * 32]
    assert all(row.cache_size == 32 for row in rows)


def test_rates_are_tokens_over_the_seconds_of_their_own_kind(loaded, steps):
    """Prefill and decode are timed apart: neither holds the other, nor the warm-up."""
    for row in measure(loaded, config(), silent):
        assert row.prefill_rate == pytest.approx(1000)
        assert row.decode_rate == pytest.approx(100)
        assert row.prefill_rate_sd == pytest.approx(0, abs=1e-6)
        assert row.decode_rate_sd == pytest.approx(0, abs=1e-6)
        for milliseconds in (row.step_ms_p50, row.step_ms_p99, row.step_ms_max):
            assert milliseconds == pytest.approx(10)
        assert row.first_token_ms == pytest.approx(128)
        assert (row.prefill_tokens, row.decode_tokens, row.batch_size) == (300, 5, 1)


def test_decode_is_measured_with_the_cache_full(loaded, steps):
    """Every pass that is timed starts with all slots taken, at every depth."""
    first = next(measure(loaded, config(depths=[1]), silent))
    timed = [step for step in steps if step.position >= first.position]
    assert len(timed) >= 2 * (2 + 1 + 1 + 5)
    assert {step.num_held for step in timed if step.num_tokens != 256} == {32}


def test_the_first_passes_are_thrown_away(loaded, steps):
    """The stream is warmed up by other passes, on a cache that is then dropped."""
    rows = measure(loaded, config(depths=[1]), silent)
    next(rows)
    starts = [index for index, step in enumerate(steps) if step.position == 0]
    # Two streams begin: the first one, of a chunk and eight single tokens, is not measured.
    assert len(starts) == 2
    warm_up = steps[: starts[1]]
    assert [step.num_tokens for step in warm_up] == [256] + [1] * 8


def test_an_end_token_ends_no_measurement(loaded, monkeypatch):
    """A model that says `end` at every step is measured for as many tokens as asked."""
    fed = []

    def always_ends(model, ids, cache, *args):
        fed.append(ids)
        logits = forward(model, ids, cache, *args)
        logits[..., 2] = 1e9
        return logits

    assert loaded.end_ids == {2}
    monkeypatch.setattr(bench, "forward", always_ends)
    [row] = measure(loaded, config(depths=[1], decode_tokens=7, repeats=1), silent)
    assert row.decode_tokens == 7
    assert sum(ids.tolist() == [[2]] for ids in fed) == 7


def test_decoding_feeds_what_the_model_finds_most_likely(loaded, steps):
    """Decode is a real loop: each token is the argmax of the step before it."""
    list(measure(loaded, config(depths=[1], decode_tokens=30, repeats=1), silent))
    decoded = [int(step.ids) for step in steps[-30:]]
    assert all(step.num_tokens == 1 for step in steps[-30:])
    assert all(0 <= token < loaded.model.config.vocab_size for token in decoded)
    assert [step.position for step in steps[-30:]] == list(
        range(steps[-1].position - 29, steps[-1].position + 1)
    )


def test_a_batch_counts_the_tokens_of_all_its_rows(loaded, steps):
    """Two rows in step: twice the tokens in the same time, twice the cache."""
    [one] = measure(loaded, config(depths=[1]), silent)
    steps.clear()
    [two] = measure(loaded, config(depths=[1], batch_size=2), silent)
    assert {step.batch_size for step in steps} == {2}
    assert two.batch_size == 2
    assert two.prefill_rate == pytest.approx(2 * one.prefill_rate)
    assert two.decode_rate == pytest.approx(2 * one.decode_rate)
    assert two.step_ms_p50 == pytest.approx(one.step_ms_p50)
    assert two.cache_megabytes == pytest.approx(2 * one.cache_megabytes)


def test_one_token_is_enough(loaded, steps):
    """`--tokens 1` with one repeat gives a rate, no spread, and equal percentiles."""
    [row] = measure(loaded, config(depths=[1], decode_tokens=1, repeats=1), silent)
    assert row.decode_rate == pytest.approx(100)
    assert row.decode_rate_sd == 0
    assert row.step_ms_p50 == row.step_ms_p99 == row.step_ms_max


def test_the_same_seed_feeds_the_same_tokens(loaded, steps):
    """Two runs with one seed are fed alike; another seed feeds something else."""

    def fed(seed):
        steps.clear()
        list(measure(loaded, config(depths=[1], repeats=1, seed=seed), silent))
        return torch.cat([step.ids.flatten() for step in steps]).tolist()

    assert fed(0) == fed(0)
    assert fed(0) != fed(1)


def test_memory_is_what_the_cache_takes_and_what_the_process_holds(loaded, steps):
    """Cache bytes are the buffers', and do not grow with depth; the peak is at least that."""
    rows = list(measure(loaded, config(), silent))
    per_token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, head size, float32
    for row in rows:
        assert row.cache_megabytes * 1e6 == pytest.approx(per_token * 32, rel=0.2)
        assert row.peak_megabytes > row.cache_megabytes
    assert rows[0].cache_megabytes == rows[1].cache_megabytes


def test_the_share_of_the_roofline_is_the_least_time_over_the_median_step(loaded, steps):
    """Bytes over bandwidth over 10 ms; rows share the weights; no bandwidth gives no share."""
    [one] = measure(loaded, config(depths=[1]), silent, BANDWIDTH)
    [two] = measure(loaded, config(depths=[1], batch_size=2), silent, BANDWIDTH)
    [unknown] = measure(loaded, config(depths=[1]), silent)
    assert one.roofline_share == pytest.approx(one.step_megabytes * 1e6 / BANDWIDTH / 0.010)
    assert two.roofline_share == pytest.approx(two.step_megabytes * 1e6 / BANDWIDTH / 0.010)
    held = 32 * 2 * 2 * 2 * 8 * 4  # tokens; keys and values, layers, heads, head size, float32
    entry = 32 * 4  # of the embedding table, which this model does not share with its head
    assert (two.step_megabytes - one.step_megabytes) * 1e6 == pytest.approx(held + entry)
    assert unknown.roofline_share is None
    assert unknown.step_megabytes == one.step_megabytes


# Arithmetic


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=300), st.integers(1, 100))
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(values, percent):
    """Nearest rank, by its definition, for any sample."""
    expected = min(
        value
        for value in values
        if 100 * sum(other <= value for other in values) >= percent * len(values)
    )
    assert percentile(values, percent) == expected


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50))
def test_the_median_and_the_maximum_are_those_of_the_standard_library(values):
    """p50 is `statistics.median_low`, p100 the maximum; the order of the values is no matter."""
    assert percentile(values, 50) == statistics.median_low(values)
    assert percentile(values[::-1], 100) == max(values)


def test_the_spread_is_the_sample_standard_deviation(loaded, steps, monkeypatch):
    """Two repeats of different speed: mean and deviation are those of `statistics`."""
    now = SimpleNamespace(seconds=0.0)
    prefills = []

    def slower_and_slower(model, ids, cache, *args):
        if ids.shape[1] == 256:
            prefills.append(1.0 + len(prefills))
            now.seconds += prefills[-1]
        return forward(model, ids, cache, *args)

    monkeypatch.setattr(bench, "forward", slower_and_slower)
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: now.seconds))
    chunk = config(
        depths=[1], prefill_tokens=256, repeats=3, cache=CacheConfig(sink_size=4, window_size=60)
    )
    monkeypatch.setattr(bench._Bench, "decode", lambda self: [1.0])
    [row] = measure(loaded, chunk, silent)
    rates = [256 / seconds for seconds in prefills[-3:]]
    assert len(prefills) == 4  # one of them the warm-up
    assert row.prefill_rate == pytest.approx(statistics.fmean(rates))
    assert row.prefill_rate_sd == pytest.approx(statistics.stdev(rates))


@pytest.mark.parametrize("depths", [[], [0], [0, 4]])
def test_depths_below_one_are_an_error(depths):
    """No depth, or one before the cache is full, is no measurement of a full cache."""
    with pytest.raises(ConfigError, match="depth must be at least 1, got 0"):
        config(depths=depths)


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("batch_size", "batch"),
        ("prefill_tokens", "prefill"),
        ("decode_tokens", "tokens"),
        ("repeats", "repeat"),
    ],
)
@pytest.mark.parametrize("value", [0, -3])
def test_counts_below_one_are_an_error_in_the_words_of_the_option(field, name, value):
    """The message names the option as the command line spells it, and the value."""
    with pytest.raises(ConfigError, match=f"^{name} must be at least 1, got {value}"):
        config(**{field: value})


def row(**overrides):
    fields = dict.fromkeys(BenchRow.__slots__, 1)
    return BenchRow(
        **{**fields, "decode_rate": 40.0, "peak_megabytes": 600.0, "cache_size": 1024, **overrides}
    )


def test_the_verdict_compares_the_last_depth_with_the_first():
    """Speed kept, in percent, and memory gained, in MB, in words."""
    rows = [row(), row(depth=4, decode_rate=1.0), row(depth=16, decode_rate=38.0)]
    assert verdict(rows) == "keeps 95% of its 1x decode speed at 16x; peak memory +0 MB"
    assert verdict([row(), row(depth=2, peak_megabytes=512.4)]).endswith("memory -88 MB")


def test_the_verdict_on_one_depth_claims_nothing_about_flatness():
    """With one row there is nothing to compare: the verdict says how to get a second."""
    words = verdict([row()])
    assert words.startswith("decode 40.0 tok/s with 1,024 tokens held")
    assert "--depth" in words
    assert "%" not in words


# The command


@pytest.fixture
def bench_command(tiny_folder, capfd, monkeypatch):
    """Run `streamchat bench` in this process; gives exit code, stdout and stderr."""
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in ("MODEL", "DEVICE", "DTYPE", "SINKS", "WINDOW", "SEED", "QUIET", "DEBUG", "COLOR"):
        monkeypatch.delenv(f"STREAMCHAT_{name}", raising=False)
    monkeypatch.setattr(roofline, "read_bandwidth", lambda device: BANDWIDTH)

    def command(*args):
        capfd.readouterr()
        sizes = ["--window", "28", "--tokens", "3", "--prefill", "8", "-r", "2"]
        code = run(["bench", "-m", str(tiny_folder), "--device", "cpu", *sizes, *args])
        out, err = capfd.readouterr()
        return code, out, err

    return command


def test_json_output_is_one_object_a_depth(bench_command):
    """Each line parses, and has every documented figure of a row."""
    code, out, err = bench_command("--depth", "2,1", "-o", "json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert "memory reads 2.0 GB/s" in err.splitlines()[-2]
    assert f"must read {rows[0]['step_megabytes']:.1f} MB" in err.splitlines()[-2]
    assert [row["depth"] for row in rows] == [1, 2]
    for row in rows:
        assert set(row) == set(BenchRow.__slots__)
        assert row["decode_rate"] > 0
        assert row["step_ms_p50"] <= row["step_ms_p99"] <= row["step_ms_max"]
    assert "decode speed at 2x; peak memory" in err.splitlines()[-1]


def test_csv_output_has_a_header_and_a_line_a_depth(bench_command):
    """The csv module reads it back, with the columns of the JSON output."""
    code, out, _ = bench_command("--depth", "1,2", "-o", "csv", "--quiet")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert [row["depth"] for row in rows] == ["1", "2"]
    assert list(rows[0]) == list(BenchRow.__slots__)
    assert {row.pop("policy") for row in rows} == {"sink"}
    assert all(float(value) >= 0 for row in rows for value in row.values())


def test_off_a_terminal_the_default_is_markdown(bench_command):
    """Without -o a file gets a Markdown table with units, and no escape code."""
    code, out, err = bench_command("--depth", "1", "--batch", "2")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines()]
    assert code == 0
    assert lines[0][:4] == ["depth", "batch", "prefill t/s", "decode t/s"]
    assert lines[2][:2] == ["1x", "2"]
    assert "±" in lines[2][2]
    assert lines[0][-1] == "roofline"
    assert lines[2][-1].endswith("%")
    assert len({len(line) for line in lines}) == 1
    assert "\x1b" not in out + err
    assert "one depth only" in err.splitlines()[-1]


def test_a_table_can_be_had_off_a_terminal(bench_command, monkeypatch):
    """`-o table` draws the table anywhere, whole, and without escape codes where none belong."""
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = bench_command("--depth", "1", "-o", "table")
    assert code == 0
    assert "1x" in out
    assert "decode t/s" in out
    assert "\x1b" not in out


def test_quiet_leaves_the_figures_only(bench_command):
    """With --quiet nothing goes to stderr."""
    code, out, err = bench_command("--depth", "1", "-o", "md", "-q")
    assert code == 0
    assert out
    assert err == ""


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--depth", "x"], "--depth must be whole numbers with commas, got 'x'"),
        (["--depth", "1,,2"], "got '1,,2'"),
        (["--depth", ""], "got ''"),
        (["--depth", "0"], "--depth must be at least 1, got 0"),
        (["--depth", "4,-1"], "got -1"),
        (["--batch", "0"], "batch must be at least 1, got 0"),
        (["--tokens", "0"], "tokens must be at least 1, got 0"),
        (["-r", "0"], "repeat must be at least 1, got 0"),
        (["--prefill", "many"], "'--prefill'"),
        (["-o", "xml"], "'xml'"),
        (["--window", "0"], "--window must be auto or a number of tokens from 1 on, got '0'"),
    ],
)
def test_bad_values_are_usage_errors(bench_command, args, words):
    """Exit 2, nothing on stdout, and one line at the end that says what was wrong."""
    code, out, err = bench_command("-q", *args)
    assert code == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert words in err


def test_a_cache_above_the_trained_length_is_refused(bench_command):
    """The limit of the model holds for the bench as well: exit 3, the largest window named."""
    code, out, err = bench_command("--window", "4093", "-q")
    assert code == 3
    assert out == ""
    assert "the largest --window is 4092" in err
