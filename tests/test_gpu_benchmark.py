"""The parts of `benchmarks/gpu.py` that a CPU can run, at tiny size.

That its figures are right on a GPU, no CPU can show.
"""

import importlib
import time
from pathlib import Path

import pytest
import torch
from conftest import tiny_model

from streamchat.model.captured import CapturedStep


@pytest.fixture
def gpu(monkeypatch):
    """The benchmark as a module."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module("gpu")


@pytest.fixture
def model():
    """A tiny model whose decode step is the static one, without a graph."""
    model = tiny_model(num_layers=2)
    binding = model.streamchat_binding
    binding.decode_step = CapturedStep(model, binding.geometry, lambda run, _device: run)
    return model


def test_without_cuda_it_says_so(gpu, monkeypatch, capsys):
    """One line, and success."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main() == 0
    assert capsys.readouterr().out == "no CUDA device here: nothing to measure\n"


def test_seconds_are_those_of_one_call(gpu):
    """Warm-ups are not counted, and the mean is of one call."""
    calls = []

    def work():
        calls.append(1)
        time.sleep(0.05 if len(calls) <= 2 else 0.01)

    seconds = gpu.seconds_each(work, 5, warm_ups=2)
    assert len(calls) == 7
    assert 0.01 <= seconds < 0.05


def test_the_bytes_of_a_step(gpu, model):
    """Weights without the embedding table, and a full cache.

    The oracle counts the tiny model's parameters by hand.
    """
    cache = gpu.full_cache(model, 12, 3)
    per_layer = 32 * 32 * 2 + 16 * 32 * 2 + 3 * 64 * 32 + 2 * 32
    weights = 4 * (2 * per_layer + 32 + 101 * 32)
    held = 2 * 2 * 3 * 2 * 16 * 8 * 4
    assert gpu.step_bytes(model, cache) == weights + held
    assert cache.num_held == 16


def test_steps_are_fed(gpu, model):
    """Decoding feeds as many tokens as it times; a cache goes the way that is asked for."""
    cache = gpu.full_cache(model, 12, 2)
    before = cache.num_seen
    assert gpu.decode_seconds(model, cache, 5) > 0
    assert cache.num_seen == before + 5 + 3
    step = model.streamchat_binding.decode_step
    with gpu.eager(model):
        assert model.streamchat_binding.decode_step is None
    assert model.streamchat_binding.decode_step is step
    assert gpu.prefill_rate(model, 12, 8) > 0
    assert gpu.recompute_seconds(model, 16) > 0


def test_the_difference_sees_a_wrong_step(gpu, model, monkeypatch):
    """Right steps are close, and one whose logits are moved is far."""
    assert gpu.difference(model, 12, 40) < 1e-5
    step = CapturedStep.__call__
    monkeypatch.setattr(
        CapturedStep, "__call__", lambda self, ids, cache: step(self, ids, cache) + 1
    )
    assert gpu.difference(model, 12, 40) > 1e-2


def test_no_measurement_begins_when_time_is_up(gpu, monkeypatch, capsys):
    """What does not fit into the budget is skipped and said; a failure stops nothing else."""
    report, done = gpu.Report(), []

    def fail():
        raise torch.cuda.OutOfMemoryError("out of memory\nand more")

    report.measure("one", fail)
    report.measure("two", lambda: done.append(2))
    monkeypatch.setattr(gpu, "BUDGET_SECONDS", -1)
    report.measure("three", lambda: done.append(3))
    assert done == [2]
    assert capsys.readouterr().err == ("one: failed: out of memory\nthree: skipped, no time left\n")


def test_rows_have_one_header(gpu, tmp_path):
    """Figures of all kinds fit under one header, with where they were taken."""
    report = gpu.Report(where=gpu.environment(threads=1, dtype="float32"))
    report.add("", "read bandwidth", 1.0, "GB/s")
    report.add("tiny", "decode step", 2.0, "ms", window_size=12, batch_size=1)
    gpu.write_csv(tmp_path / "gpu.csv", report.rows)
    header, *lines = (tmp_path / "gpu.csv").read_text().splitlines()
    assert len(lines) == 2
    for column in ("commit", "torch", "device", "dtype", "seed", "window_size", "value"):
        assert column in header.split(",")
    assert gpu.read_bandwidth(torch.device("cpu"), 2**20) > 0
