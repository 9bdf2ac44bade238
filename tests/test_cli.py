"""The command line: exit codes, one line of complaint, data on stdout and nothing else there.

What needs the operating system (pipes that break, signals, a full disk, memory) runs the real
program in a process of its own; that costs a few seconds of imports each time, so the rest calls
`run` in this process.
"""

import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import streamchat
from streamchat import Stream, load
from streamchat.cli import app as app_module
from streamchat.cli.app import app, run
from streamchat.cli.signals import StopRequest

pytestmark = pytest.mark.usefixtures("undisturbed")
posix_only = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and pipes")
needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")

PROGRAM = [sys.executable, "-m", "streamchat"]
SCORE = ["pipe", "--mode", "score"]

START_SECONDS = 90
"""How long a start may take before a test gives up; it is 3 s on an idle machine."""

SOON_SECONDS = 5
"""How long an end may take: two seconds at most on an idle machine, more beside other work."""

ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith("STREAMCHAT_")
    and name not in ("FORCE_COLOR", "NO_COLOR", "GITHUB_ACTIONS", "PY_COLORS", "PYTHONUNBUFFERED")
} | {
    "PYTHONPATH": str(Path(streamchat.__file__).parents[1]),
    "PYTHONIOENCODING": "utf-8",
    "HF_HUB_OFFLINE": "1",
    "STREAMCHAT_CONFIG": "",
    "COLUMNS": "100",
}


# In this process


@pytest.fixture
def score_command(command, tiny_folder):
    """`streamchat pipe --mode score` with the tiny model."""

    def call(*args, stdin=b""):
        return command(*SCORE, "-m", tiny_folder, "--device", "cpu", *args, stdin=stdin)

    return call


def assert_one_line(err):
    """A complaint is one line, from streamchat, without a traceback or an escape code."""
    lines = err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("streamchat: ")
    assert not re.search("[\x00-\x08\x0b-\x1f]", err)


def expected_lines(tiny_folder, lines):
    """Plain output for lines of text, computed token by token in this process."""
    loaded = load(str(tiny_folder), device="cpu")
    stream, out = Stream(loaded), []
    for line in lines:
        losses = []
        for token in loaded.tokenizer.encode(line + "\n"):
            losses += stream.score([token])
        known = [loss for loss in losses if loss is not None]
        out.append((sum(known) / len(known), line))
    return out


BAD_COMMANDS = [
    (["-m", "/no/such/folder"], 3, "no such model file or folder: /no/such/folder"),
    (["-m", "./no.gguf"], 3, "no such model file or folder: ./no.gguf"),
    (["-m", "FILE"], 3, "is not a .gguf file"),
    (["-m", "FOLDER"], 3, "no config.json in"),
    (["-m", "TINY", "--window", "4093"], 3, "the largest --window is 4092"),
    (["-m", "TINY", "--sinks", "4096"], 3, "lower --sinks"),
    (["missing.txt"], 2, "cannot read missing.txt: No such file or directory"),
    (["FOLDER"], 2, "is a folder; expected a file"),
    (["FILE", "missing.txt"], 2, "cannot read missing.txt"),
    (["--bad"], 2, "No such option: --bad"),
    (["--mode", "wrong"], 2, "'wrong' is not one of 'notes', 'reply', 'score'"),
    (["--window", "0"], 2, "--window must be auto or a number of tokens from 1 on, got '0'"),
    (["--window", "-5"], 2, "--window must be auto or a number of tokens from 1 on, got '-5'"),
    (["--window", "1.5"], 2, "--window must be auto or a number of tokens from 1 on, got '1.5'"),
    (["--sinks", "-1"], 2, "--sinks must be auto or a number of tokens from 0 on, got '-1'"),
    (["--window", "many"], 2, "--window must be auto or a number of tokens from 1 on, got 'many'"),
    (["-m", "TINY", "--dtype", "float8"], 2, "'float8' is not one of 'auto', 'float32', "),
    (["-m", "TINY", "--device", "gpu"], 2, "device must be auto, cpu, cuda or mps, got 'gpu'"),
    (["--color", "red"], 2, "'red' is not one of"),
]


@pytest.mark.parametrize(("args", "code", "words"), BAD_COMMANDS, ids=lambda value: str(value)[:40])
def test_what_is_wrong_ends_with_one_line_and_the_documented_code(
    command, tiny_folder, tmp_path, args, code, words
):
    """Usage errors end with 2, models that cannot be had with 3; one line on stderr says why."""
    (tmp_path / "file.txt").write_text("text\n", encoding="utf-8")
    places = {"TINY": tiny_folder, "FOLDER": tmp_path, "FILE": tmp_path / "file.txt"}
    done = command(*SCORE, "-q", *[places.get(arg, arg) for arg in args], stdin=b"text\n")
    assert done.code == code
    assert words in done.err
    assert_one_line(done.err)
    assert done.out == ""


@pytest.mark.parametrize(
    ("args", "words"),
    [(["nonsense"], "No such command 'nonsense'"), (["--nonsense"], "No such option: --nonsense")],
)
def test_a_command_that_is_not_there_is_a_usage_error(command, args, words):
    """A misspelt command or global option ends with 2 and one line."""
    done = command(*args)
    assert done.code == 2
    assert words in done.err
    assert_one_line(done.err)


def test_a_line_end_in_a_message_becomes_a_space(command):
    """A message that comes in two lines is joined into one without odd symbols."""
    done = command("pipe", "--mode", "a\nb")
    assert "␊" not in done.err
    assert_one_line(done.err)


def test_cuda_on_a_machine_without_it_is_a_usage_error(score_command, monkeypatch):
    """`--device cuda` without CUDA says what to use instead, before anything is loaded."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = score_command("-q", "--device", "cuda", stdin=b"text\n")
    assert done.code == 2
    assert "device 'cuda' is not there" in done.err
    assert "--device cpu" in done.err
    assert_one_line(done.err)


def test_closed_standard_input_is_a_usage_error(command, monkeypatch):
    """With `<&-` Python has no standard input; the message says what to do."""
    monkeypatch.setattr(sys, "stdin", None)
    code = run([*SCORE])
    assert code == 2


def test_an_input_that_cannot_be_read_fails_while_running(score_command, monkeypatch):
    """An input that breaks in the middle ends with 1 and the system's reason."""

    class Broken:
        def __init__(self, file):
            self.fileno = file.fileno

        def read(self, size):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr("streamchat.cli.pipe.open_inputs", lambda names, stack: [Broken(sys.stdin)])
    done = score_command("-q")
    assert done.code == 1
    assert "cannot read the input: [Errno 5] Input/output error" in done.err
    assert_one_line(done.err)


def test_a_bug_of_ours_is_one_line_too(command, monkeypatch):
    """An exception that nobody foresaw ends with 1 and points to --debug, without a traceback."""

    def broken(names, stack):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("streamchat.cli.pipe.open_inputs", broken)
    done = command(*SCORE)
    assert done.code == 1
    assert "internal error: ZeroDivisionError: by zero (see --debug)" in done.err
    assert_one_line(done.err)


@pytest.mark.parametrize("where", ["before", "after", "environment"])
def test_debug_shows_the_traceback(command, monkeypatch, where):
    """--debug, on either side of the command or in the environment, adds where it happened."""
    args = [*SCORE, "--window", "0"]
    if where == "environment":
        monkeypatch.setenv("STREAMCHAT_DEBUG", "1")
    else:
        args = ["--debug", *args] if where == "before" else [*args, "--debug"]
    done = command(*args)
    assert done.code == 2
    assert "Traceback (most recent call last)" in done.err
    assert done.err.splitlines()[-1] == (
        "streamchat: --window must be auto or a number of tokens from 1 on, got '0'"
    )


# What comes out


def test_plain_output_is_a_score_a_tab_its_standard_score_a_tab_and_the_line(
    score_command, tiny_folder
):
    """Line by line the text as it was and its score, which is that of feeding token by token."""
    lines = ["hello", "", "naïve 我很 👩‍👩‍👧", "  two  spaces ", "[/INST] :smile: <|im_end|>"]
    done = score_command(stdin="\n".join(lines).encode() + b"\n")
    assert done.code == 0
    got = [line.split("\t", 2) for line in done.out.split("\n")[:-1]]
    expected = expected_lines(tiny_folder, lines)
    assert [text for _, _, text in got] == [text for _, text in expected]
    for (score, standard, _), (nats, _) in zip(got, expected, strict=True):
        assert standard == "-"  # too few lines before it
        assert re.fullmatch(r"\d+\.\d{3}", score)
        assert float(score) == pytest.approx(nats, abs=2e-3)


def test_json_output_has_the_documented_events(score_command, tiny_folder):
    """start, a score for each line, end; every line parses, and the counts add up."""
    done = score_command("--json", "--sinks", "2", "--window", "8", stdin=b"one\ntwo\n\nlast")
    start, *scores, end = [json.loads(line) for line in done.out.splitlines()]
    assert start == {
        "event": "start",
        "mode": "score",
        "model": "tiny-llama",
        "sink_size": 2,
        "window_size": 8,
    }
    assert [score["text"] for score in scores] == ["one", "two", "", "last"]
    assert [score["line"] for score in scores] == [1, 2, 3, 4]
    assert [score["position"] for score in scores] == [0, 4, 8, 9]
    assert [score["num_tokens"] for score in scores] == [4, 4, 1, 5]
    for score in scores:
        assert list(score) == [
            "event",
            "line",
            "part",
            "ends_line",
            "text",
            "position",
            "num_tokens",
            "nats",
            "nats_per_token",
            "z_score",
        ]
        assert (score["event"], score["part"], score["ends_line"]) == ("score", 1, True)
    assert end == {
        "event": "end",
        "lines": 4,
        "num_tokens": 14,
        "num_evicted": 4,
        "nats_per_token": pytest.approx(sum(s["nats"] for s in scores) / 13, abs=1e-3),
    }


def test_the_first_token_of_a_stream_has_no_score(score_command):
    """A stream that is one line end has nothing that predicts it: null, and a dash."""
    assert score_command(stdin=b"\n").out == "-\t-\t\n"
    events = [json.loads(line) for line in score_command("--json", stdin=b"\n").out.splitlines()]
    assert events[1]["nats"] is None
    assert events[1]["nats_per_token"] is None
    assert events[2]["nats_per_token"] is None


def test_several_files_are_one_stream(score_command, tmp_path):
    """Files are read one after another, standard input where a dash stands, lines numbered on."""
    (tmp_path / "a.txt").write_bytes(b"one\nno line end")
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfthree\n")
    done = score_command("--json", tmp_path / "a.txt", "-", tmp_path / "b.txt", stdin=b"two\n")
    scores = [json.loads(line) for line in done.out.splitlines()[1:-1]]
    assert [score["text"] for score in scores] == ["one", "no line end", "two", "three"]
    assert [score["line"] for score in scores] == [1, 2, 3, 4]


def test_empty_input_is_no_error(score_command):
    """No input: exit 0, no line, and a summary that says so."""
    done = score_command()
    assert (done.code, done.out) == (0, "")
    assert "end of input: 0 lines, 0 tokens, 0 evicted" in done.err
    events = [json.loads(line) for line in score_command("--json").out.splitlines()]
    assert [event["event"] for event in events] == ["start", "end"]
    assert events[1]["nats_per_token"] is None


CAPTIONS = b"\xef\xbb\xbfWEBVTT\r\n\r\n00:00.000 --> 00:01.000\r\ncaf\xc3\xa9 \xff\xfe \x00 ok\r\n"


def test_bom_crlf_bad_bytes_and_nul(score_command):
    """BOM and CR are gone, each bad byte is U+FFFD, NUL goes through, the result is in order.

    As plain text every line is there; as what it is, only the words.
    """
    spoken = "café \ufffd\ufffd \x00 ok"
    lines = ["WEBVTT", "", "00:00.000 --> 00:01.000", spoken]
    for input_format, expected in (("plain", lines), ("auto", [spoken]), ("webvtt", [spoken])):
        done = score_command("--format", input_format, stdin=CAPTIONS)
        texts = [line.split("\t", 2)[2] for line in done.out.split("\n")[:-1]]
        assert done.code == 0
        assert texts == expected
        assert ("input webvtt (auto)" in done.err) is (input_format == "auto")


def test_binary_input_is_no_error(score_command):
    """Random bytes are scored like anything else: exit 0, a line for each line feed."""
    data = random.Random(0).randbytes(20_000)
    done = score_command("--json", stdin=data)
    events = [json.loads(line) for line in done.out.split("\n")[:-1]]
    assert done.code == 0
    assert events[-1]["lines"] == data.count(b"\n") + (not data.endswith(b"\n"))
    assert "".join(event["text"] for event in events[1:-1]) == data.decode(
        "utf-8", "replace"
    ).replace("\r\n", "\n").replace("\n", "")


def test_quiet_writes_data_only(score_command):
    """With --quiet, stderr stays empty while all is well."""
    done = score_command("-q", stdin=b"text\n")
    assert done.code == 0
    assert done.out.endswith("\ttext\n")
    assert done.err == ""


def test_what_is_going_on_is_said_on_stderr(score_command):
    """Loading, checking, the cache that is used, and a summary; none of it on stdout."""
    done = score_command("--window", "60", stdin=b"text\n")
    said = [line.removeprefix("streamchat: ") for line in done.err.splitlines()]
    assert [line for line in said if not line.startswith("compiling")] == [
        "loading tiny-llama",
        "checking that it streams exactly",
        "tiny-llama on cpu, 4 pinned + 60 newest",
        done.err.splitlines()[-1].removeprefix("streamchat: "),
    ]
    assert "end of input: 1 line, 5 tokens, 0 evicted, " in done.err
    assert len(done.out.splitlines()) == 1


@pytest.mark.parametrize(
    "environment",
    [
        {"NO_COLOR": "1"},
        {"FORCE_COLOR": "1"},
        {"TERM": "dumb"},
        {"NO_COLOR": "1", "FORCE_COLOR": "1"},
    ],
    ids=lambda environment: "+".join(environment),
)
@pytest.mark.parametrize("flag", [[], ["--color", "always"], ["--json"]], ids=" ".join)
def test_no_escape_code_in_a_file(score_command, monkeypatch, environment, flag):
    """Whatever is asked for colours, data and messages hold no escape code off a terminal."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = score_command(*flag, stdin=b"one\ntwo\n")
    assert done.code == 0
    assert "\x1b" not in done.out
    assert "\x1b" not in done.err


@pytest.mark.parametrize(
    ("environment", "args", "expected"),
    [
        ({"STREAMCHAT_WINDOW": "16"}, [], 16),
        ({"STREAMCHAT_WINDOW": "16"}, ["--window", "8"], 8),
        ({}, [], 1020),
    ],
)
def test_a_flag_beats_the_environment_which_beats_the_default(
    score_command, monkeypatch, environment, args, expected
):
    """Precedence: flag, STREAMCHAT_*, default."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = score_command("--json", *args, stdin=b"x\n")
    assert json.loads(done.out.splitlines()[0])["window_size"] == expected


WINDOW_WORDS = "--window must be auto or a number of tokens from 1 on"


@pytest.mark.parametrize("value", ["abc", "0", "-1", "1e3", "AUTO", " "])
def test_a_bad_window_in_the_environment_names_the_option(score_command, monkeypatch, value):
    """STREAMCHAT_WINDOW is held to the same rule as --window, in the same line."""
    monkeypatch.setenv("STREAMCHAT_WINDOW", value)
    done = score_command(stdin=b"x\n")
    assert done.code == 2
    assert f"{WINDOW_WORDS}, got '{value}'" in done.err
    assert_one_line(done.err)


def test_window_auto_is_the_trained_length_where_memory_allows(score_command, monkeypatch):
    """The header says what was chosen and that it was; the environment may ask for it, too."""
    done = score_command("--window", "auto", "--json", stdin=b"x\n")
    assert "tiny-llama on cpu, 4 pinned + 4,092 newest (auto)\n" in done.err
    assert json.loads(done.out.splitlines()[0])["window_size"] == 4092
    monkeypatch.setenv("STREAMCHAT_WINDOW", "auto")
    assert "6 pinned + 4,090 newest (auto)\n" in score_command("--sinks", "6", stdin=b"x\n").err
    assert "4 pinned + 8 newest\n" in score_command("--window", "8", stdin=b"x\n").err


@pytest.mark.parametrize("args", [["chat", "-s"], ["pipe", "--prompt"]], ids=["chat", "notes"])
def test_window_auto_gives_way_to_what_is_pinned(command, tiny_folder, args):
    """Sinks that grow to the system prompt leave the cache as large as the model allows."""
    prompt = "You answer in one short sentence, whatever you are asked."
    done = command(*args, prompt, "-m", tiny_folder, "--window", "auto", "--max-new", "2")
    found = re.search(r"(\d+) pinned \+ ([\d,]+) newest \(auto\)", done.err)
    assert done.code == 0
    assert int(found[1]) > len(prompt)
    assert int(found[1]) + int(found[2].replace(",", "")) == 4096


def test_bench_and_info_know_window_auto(command, tiny_folder):
    """Bench says it in its header; info in the row of the window, and as a number in JSON."""
    options = ["--depth", "1", "--tokens", "2", "--prefill", "2", "-r", "1"]
    done = command("bench", "-m", tiny_folder, "--window", "auto", *options)
    assert done.code == 0
    assert "cache 4 pinned + 4,092 newest (auto)\n" in done.err
    text = command("info", tiny_folder, "--window", "auto").out
    assert re.search(r"^window size +4,092 \(auto\)$", text, re.MULTILINE)
    facts = json.loads(command("info", tiny_folder, "--window", "auto", "--json").out)
    assert facts["window_size"] == 4092
    assert facts["cache_size"] == 4096


def test_a_chat_wants_room_for_four_caches_and_score_for_one(
    command, score_command, tiny_folder, monkeypatch
):
    """With memory for some 5,500 tokens, score takes all it may and a chat a quarter."""
    monkeypatch.setattr("streamchat.model.fit.free_bytes", lambda device: 2_000_000)
    assert "+ 4,092 newest (auto)" in score_command("--window", "auto", stdin=b"x\n").err
    chat = command("chat", "-m", tiny_folder, "--sinks", "4", "--window", "auto").err
    pinned, window = re.search(r"(\d+) pinned \+ ([\d,]+) newest \(auto\)", chat).groups()
    assert int(pinned) + int(window.replace(",", "")) == 1280


def test_the_model_may_come_from_the_environment(command, monkeypatch, tiny_folder):
    """STREAMCHAT_MODEL stands for --model, in pipe and in info."""
    monkeypatch.setenv("STREAMCHAT_MODEL", str(tiny_folder))
    assert command(*SCORE, stdin=b"x\n").out.endswith("\tx\n")
    assert "tiny-llama" in command("info").out


# info


def test_info_says_what_a_model_is_and_what_it_takes(command, tiny_folder):
    """Family, positions, trained length, cache and memory, without reading any weights."""
    done = command("info", tiny_folder, "--window", "60", "--json")
    facts = json.loads(done.out)
    per_token = 2 * 1 * 2 * 16 * 4  # keys and values, layers, heads, head size, float32
    assert done.code == 0
    assert facts["family"] == "llama"
    assert facts["trained_length"] == 4096
    assert facts["softmax"] == "standard"
    assert facts["where"] == str(tiny_folder)
    assert facts["cache_size"] == 64
    assert facts["bytes_per_token"] == per_token
    assert facts["cache_bytes"] == 64 * per_token
    assert facts["memory"]["1000000"] == {"dense": 10**6 * per_token, "bounded": 64 * per_token}
    assert facts["positions"].startswith("RoPE, theta 10,000")
    text = command("info", "-m", tiny_folder).out
    assert re.search(r"^trained length +4,096$", text, re.MULTILINE)
    assert re.search(r"^\| +1,000,000 \| +256\.0 MB \| +0\.3 MB \|$", text, re.MULTILINE)


def test_info_says_why_a_model_is_refused(command, tmp_path):
    """A family that cannot be streamed ends with 3 and the reason, from its config alone."""
    config = {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    done = command("info", tmp_path, "-q")
    assert done.code == 3
    assert "model family 'mamba' is refused: it has state-space" in done.err
    assert_one_line(done.err)
    assert done.out == ""


@posix_only
def test_info_into_a_closed_pipe_is_no_failure(tiny_folder, monkeypatch):
    """`streamchat info | head -1` ends with 0, like pipe and bench."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        code = run(["info", str(tiny_folder), "-q"])
    assert code == 0


# Help


def documented_options():
    """Every command with its options, as (command, option)."""
    top = app_module.typer.main.get_command(app)
    for name, command in {"": top, **top.commands}.items():
        for parameter in command.params:
            for option in [*parameter.opts, *parameter.secondary_opts]:
                if option.startswith("-"):
                    yield name, option


@pytest.mark.parametrize("name", ["", "pipe", "bench", "info"])
def test_help_names_every_option_and_has_an_example(command, name):
    """--help of each command lists all its options and shows how it is called."""
    done = command(*[name] if name else [], "--help")
    assert done.code == 0
    assert done.err == ""
    options = [option for owner, option in documented_options() if owner == name]
    assert "--debug" in options
    missing = [o for o in options if not re.search(rf"(?<![\w-]){re.escape(o)}(?![\w-])", done.out)]
    assert missing == []
    examples = done.out.split("Examples:")[1]
    assert re.search(rf"streamchat {name}".rstrip(), examples)


def test_help_without_anything_and_the_version(command):
    """`streamchat` alone shows the help; --version the version; both end with 0."""
    alone = command()
    assert alone.code == 0
    assert alone.out.strip() == command("--help").out.strip()
    assert command("--version").out == f"streamchat {streamchat.__version__}\n"


def test_help_lists_the_exit_codes(command):
    """The exit codes that scripts rely on are in the help."""
    words = " ".join(command("--help").out.split())
    assert "0 done, 1 failed while running, 2 usage, 3 model cannot be loaded or streamed" in words
    assert "130 interrupted, 143 terminated" in words


# A process of its own


class Programs:
    """The processes that a test started, and the threads that read from them."""

    def __init__(self):
        self.processes, self.threads = [], []

    def start(self, *args, environment=None, **streams):
        """Start the program; all three standard streams are pipes unless `streams` says more."""
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process = subprocess.Popen(
            [*PROGRAM, *map(str, args)],
            env={**ENVIRONMENT, **(environment or {})},
            **{**pipes, **streams},
        )
        self.processes.append(process)
        return process

    def finish(self, *args, data=None, **options):
        """Start it, feed it, wait for its end; gives exit code, stdout and stderr as text."""
        process = self.start(*args, **options)
        out, err = process.communicate(data, timeout=START_SECONDS)
        return process.returncode, (out or b"").decode(), (err or b"").decode()

    def read_lines(self, file):
        """A list that fills with (arrival time, line) pairs in the background."""
        lines = []

        def collect():
            for line in iter(file.readline, b""):
                lines.append((time.monotonic(), line.decode().rstrip("\n")))

        self.threads.append(threading.Thread(target=collect, daemon=True))
        self.threads[-1].start()
        return lines

    def join(self):
        """Wait until everything has been read."""
        for thread in self.threads:
            thread.join()

    def close(self):
        """End whatever still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        self.join()
        for process in self.processes:
            for file in (process.stdin, process.stdout, process.stderr):
                if file:
                    file.close()


@pytest.fixture
def programs():
    """Starts the real program; nothing of it is left after the test."""
    running = Programs()
    yield running
    running.close()


def wait_until(condition, seconds=START_SECONDS):
    """Wait for something to become true; returns when it did."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
    return time.monotonic()


def test_help_is_there_in_half_a_second(programs):
    """The help does not wait for torch: the best of three starts is below half a second."""
    seconds = []
    for _ in range(3):
        started = time.monotonic()
        assert programs.finish("--help")[0] == 0
        seconds.append(time.monotonic() - started)
    assert min(seconds) < 0.5


@pytest.mark.parametrize(
    "environment",
    [
        {"NO_COLOR": "1"},
        {"TERM": "dumb"},
        {"NO_COLOR": "1", "FORCE_COLOR": "1"},
    ],
    ids="+".join,
)
def test_help_in_a_file_has_no_escape_code(programs, environment):
    """NO_COLOR wins over FORCE_COLOR in the help as well."""
    code, out, _ = programs.finish("pipe", "--help", environment=environment)
    assert code == 0
    assert "\x1b" not in out


@posix_only
def test_help_into_a_closed_pipe_is_no_failure(programs):
    """`streamchat --help | head -1` ends with 0 and says nothing on stderr."""
    process = programs.start("--help")
    process.stdout.close()
    assert process.wait(20) == 0
    assert process.stderr.read() == b""


@posix_only
def test_closed_standard_streams():
    """`<&-` is a usage error in one line on stderr; nothing of it gets onto stdout."""
    line = " ".join([*PROGRAM, *SCORE])
    done = subprocess.run(
        ["/bin/sh", "-c", f"{line} <&-"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "standard input is closed" in done.stderr
    assert_one_line(done.stderr)


def test_an_unknown_hub_id_is_one_line(programs):
    """A Hub id that is neither cached nor reachable ends with 3 and one line, offline."""
    code, out, err = programs.finish(*SCORE, "-q", "-m", "nobody/no-such-model", data=b"text\n")
    assert code == 3
    assert out == ""
    assert "cannot load model 'nobody/no-such-model'" in err
    assert_one_line(err)


def test_a_model_with_its_own_code_is_refused_without_eating_the_input(
    programs, tiny_folder, tmp_path
):
    """Exit 3 within seconds; the first line of input is not taken for an answer."""
    config = json.loads((tiny_folder / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "code.C", "AutoModel": "code.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "code.py").write_text(
        f"open({str(tmp_path / 'executed')!r}, 'w')\n", encoding="utf-8"
    )
    source = tmp_path / "input"
    source.write_bytes(b"y\nhello\n")
    with source.open("rb") as stdin:
        started = time.monotonic()
        code, out, err = programs.finish(*SCORE, "-q", "-m", tmp_path, stdin=stdin)
        elapsed = time.monotonic() - started
        # The descriptor is shared: had the program read, the position would have moved.
        assert os.lseek(stdin.fileno(), 0, os.SEEK_CUR) == 0
    assert code == 3
    assert elapsed < 20
    assert "--trust-remote-code" in err
    assert_one_line(err)
    assert out == ""
    assert not (tmp_path / "executed").exists()


@posix_only
def test_each_line_is_out_before_the_next_one_comes_and_ctrl_c_ends_cleanly(programs, tiny_folder):
    """On a live input every line is scored within a second; SIGINT then ends with 130.

    FORCE_COLOR is set: still neither stream holds an escape code.
    """
    process = programs.start(*SCORE, "-m", tiny_folder, environment={"FORCE_COLOR": "1"})
    lines = programs.read_lines(process.stdout)
    messages = programs.read_lines(process.stderr)
    wait_until(lambda: any("waiting for input" in text for _, text in messages))
    seconds = []
    for number in range(1, 6):
        written = time.monotonic()
        process.stdin.write(f"line {number}\n".encode())
        process.stdin.flush()
        wait_until(lambda number=number: len(lines) == number, seconds=20)
        seconds.append(lines[-1][0] - written)
        time.sleep(0.2)
    assert statistics.median(seconds) < 1
    process.stdin.write(b"a line without an end")
    process.stdin.flush()
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    stopped = time.monotonic()
    assert process.wait(20) == 130
    assert time.monotonic() - stopped < SOON_SECONDS
    programs.join()
    assert [text.split("\t")[2] for _, text in lines] == [f"line {n}" for n in range(1, 6)]
    assert messages[-1][1].startswith("streamchat: stopped: 5 lines, ")
    assert not any("\x1b" in text or "Traceback" in text for _, text in lines + messages)


@posix_only
def test_sigterm_ends_with_143_and_a_whole_last_line(programs, tiny_folder, tmp_path):
    """In the middle of a long file: 143, every line whole, and the `end` event of the lines."""
    source = tmp_path / "long.txt"
    source.write_bytes(b"".join(b"line %d of a long file\n" % n for n in range(200_000)))
    process = programs.start(*SCORE, "-m", tiny_folder, "--json", source, stdin=subprocess.DEVNULL)
    lines = programs.read_lines(process.stdout)
    messages = programs.read_lines(process.stderr)
    wait_until(lambda: len(lines) > 50)
    process.terminate()
    stopped = time.monotonic()
    assert process.wait(20) == 143
    assert time.monotonic() - stopped < SOON_SECONDS
    programs.join()
    events = [json.loads(text) for _, text in lines]
    assert [event["line"] for event in events[1:-1]] == list(range(1, len(events) - 1))
    assert events[-1]["event"] == "end"
    assert events[-1]["lines"] == len(events) - 2 < 200_000
    assert messages[-1][1].startswith("streamchat: stopped: ")


@posix_only
@pytest.mark.parametrize("environment", [{}, {"PYTHONUNBUFFERED": "1"}], ids="+".join)
def test_a_reader_that_leaves_ends_a_busy_stream(programs, tiny_folder, tmp_path, environment):
    """`| head -1` on a long file: 0 within two seconds, no traceback, nothing at exit."""
    source = tmp_path / "long.txt"
    source.write_bytes(b"some line of text\n" * 200_000)
    process = programs.start(*SCORE, "-m", tiny_folder, source, environment=environment, stdin=None)
    messages = programs.read_lines(process.stderr)
    assert process.stdout.readline().endswith(b"\tsome line of text\n")
    process.stdout.close()
    left = time.monotonic()
    assert process.wait(20) == 0
    assert time.monotonic() - left < SOON_SECONDS
    programs.join()
    assert [text for _, text in messages if not text.startswith("streamchat: ")] == []
    assert not any("error" in text or "Broken" in text for _, text in messages)


@posix_only
def test_a_reader_that_leaves_ends_an_idle_stream(programs, tiny_folder):
    """`tail -f | streamchat pipe | head -1` ends although no further line comes."""
    process = programs.start(*SCORE, "-m", tiny_folder, "-q")
    process.stdin.write(b"the only line\n")
    process.stdin.flush()
    assert process.stdout.readline().endswith(b"\tthe only line\n")
    process.stdout.close()
    left = time.monotonic()
    assert process.wait(20) == 0
    assert time.monotonic() - left < SOON_SECONDS
    assert process.stderr.read() == b""


@needs_full
def test_a_full_disk_is_one_line_and_exit_1(programs, tiny_folder):
    """What cannot be written is said once, and the flush at exit adds nothing."""
    with Path("/dev/full").open("wb") as full:
        code, _, err = programs.finish(*SCORE, "-m", tiny_folder, "-q", stdout=full, data=b"text\n")
    assert code == 1
    assert "cannot write to standard output: No space left on device" in err
    assert_one_line(err)


@posix_only
def test_ctrl_c_while_loading_ends_without_a_traceback(programs, tiny_folder):
    """SIGINT in the middle of the imports ends the program at once, without a traceback.

    Where it hits code that is run from a string, as in each dataclass, CPython ends the process by
    the signal itself, after all of our code is done; a shell shows 130 for that as well.
    """
    process = programs.start(*SCORE, "-m", tiny_folder)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    out, err = (stream.decode() for stream in process.communicate(timeout=START_SECONDS))
    assert process.returncode in (130, -signal.SIGINT)
    assert out == ""
    assert "Traceback" not in err


@posix_only
def test_the_second_signal_ends_at_once(monkeypatch):
    """The first signal asks to stop, the second leaves immediately with the second's code."""

    class Left(BaseException):
        """In the place of the end of the process."""

    def leave(code):
        raise Left(code)

    asked = []
    monkeypatch.setattr(os, "_exit", leave)
    stop = StopRequest(lambda: asked.append(True))
    assert not stop()
    os.kill(os.getpid(), signal.SIGINT)
    wait_until(stop, seconds=5)
    assert (stop.exit_code, asked) == (130, [True])
    with pytest.raises(Left, match="143"):  # noqa: PT012 - the signal may come a moment later
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: False, seconds=5)
    assert asked == [True]


# Memory: a line without end

LONG_LINE_BYTES = 10_000_000


@pytest.fixture
def runs_folder(tmp_path):
    """A tiny model whose tokenizer has tokens for runs of the letter a, up to 256 of them.

    So ten megabytes of it are 40,000 tokens, which the tiny model reads in two seconds.
    """
    tokens = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges, longest = [], "a"
    while len(longest) < 256:
        merges.append((longest, longest))
        longest += longest
        tokens.append(longest)
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    folder = tmp_path / "runs"
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def peak_megabytes(programs, folder, source, *args):
    """Score a file in a process of its own; gives its output and the memory it had at most."""
    with source.open("rb") as stdin:
        process = programs.start(*SCORE, "-q", "-m", folder, *args, stdin=stdin, stderr=None)
        out = process.stdout.read().decode()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return out, usage.ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


@posix_only
def test_a_line_without_end_takes_no_memory(programs, runs_folder, tmp_path):
    """Ten megabytes without a line feed: the peak is within 50 MB of that of a short line.

    Read or encoded as one line it would be several hundred megabytes more.
    """
    short, long = tmp_path / "short", tmp_path / "long"
    short.write_bytes(b"a" * 3000)
    long.write_bytes(b"a" * LONG_LINE_BYTES)
    _, base = peak_megabytes(programs, runs_folder, short)
    out, peak = peak_megabytes(programs, runs_folder, long)
    assert peak < base + 50
    lengths = [len(line.split("\t")[2]) for line in out.splitlines()]
    assert sum(lengths) == LONG_LINE_BYTES
    assert max(lengths) <= 4096
