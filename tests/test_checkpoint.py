"""A pipe that is killed and resumed says what one that ran through says, byte for byte.

The oracle is the program itself, undisturbed and without a session. Killed is the real program, in
a process of its own, by SIGKILL.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_folder import unprivileged  # noqa: F401 - a fixture
from test_log import small_disk  # noqa: F401 - a fixture

import streamchat
from streamchat.cli.app import run
from streamchat.cli.signals import EXIT_CODES, StopRequest
from streamchat.errors import SessionError
from streamchat.events import Origin
from streamchat.model import fit
from streamchat.pipe import checkpoint, written
from streamchat.pipe.lines import Piece
from streamchat.pipe.place import Place
from streamchat.store.folder import FOLDER_VARIABLE, Sessions
from streamchat.store.log import Log
from streamchat.store.recall import search
from streamchat.store.state import load, save

posix_only = pytest.mark.skipif(os.name == "nt", reason="signals and forks of POSIX")

PATIENCE = 120.0
"""Seconds to wait for what must come."""

WORDS = ["the", "ship", "left", "harbour", "at", "dawn", "with", "sails", "of", "red"]

# One run after the other, each in a fork: importing torch takes longer than all the rest.
SERVER = """
import json, os, sys
import torch
import streamchat.cli.pipe_modes, streamchat.pipe.listen, streamchat.pipe.reply
from streamchat.cli.app import run
from streamchat.cli.signals import start_interrupt
from streamchat.model import load, plan

for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        for number, (name, flags) in enumerate(job["files"]):
            handle = os.open(name, flags, 0o600)
            os.dup2(handle, number)
            os.close(handle)
        start_interrupt.install()
        try:
            code = run(job["args"])
        finally:
            sys.stdout.flush()
        os._exit(code)
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


class Program:
    """The program in a process of its own, one at a time."""

    def __init__(self, folder, data):
        self.folder, self.data = folder, data
        environment = {k: v for k, v in os.environ.items() if not k.startswith("STREAMCHAT_")}
        environment |= {
            "PYTHONPATH": str(Path(streamchat.__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
            FOLDER_VARIABLE: str(data),
        }
        self.server = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SERVER],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, *args, out, err=os.devnull, stdin=os.devnull):
        """Start `streamchat pipe` with these options; returns its process id."""
        options = ["-m", self.folder, "--sinks", "4", "--quantize", "none", "--no-self-check"]
        append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        job = {
            "args": ["pipe", *map(str, [*options, *args])],
            "files": [(str(stdin), os.O_RDONLY), (str(out), append), (str(err), append)],
        }
        self.server.stdin.write(json.dumps(job, default=str) + "\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline())

    def wait(self):
        """Wait for its end; returns the exit code, negative for a signal."""
        return int(self.server.stdout.readline())

    def __call__(self, *args, **files):
        self.start(*args, **files)
        return self.wait()

    def close(self):
        self.server.stdin.close()
        self.server.wait(PATIENCE)
        self.server.stdout.close()


@pytest.fixture(scope="module")
def program(tiny_folder, tmp_path_factory):
    """Runs `streamchat pipe` in another process, with sessions of its own."""
    if os.name == "nt":
        pytest.skip("forks of POSIX")
    found = Program(str(tiny_folder), tmp_path_factory.mktemp("data"))
    yield found
    found.close()


@pytest.fixture
def pipe(tiny_folder, undisturbed, monkeypatch, capfd, tmp_path):
    """Run `streamchat pipe` here, standard output appended to a file; gives code and messages."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "data"))

    def call(*args, out=tmp_path / "out", sizes=("--window", "60"), stdin=os.devnull):
        options = ["-m", tiny_folder, "--sinks", "4", *sizes, "--quantize", "none"]
        capfd.readouterr()
        with Path(stdin).open("rb") as source, Path(out).open("a") as target:
            monkeypatch.setattr(sys, "stdin", source)
            monkeypatch.setattr(sys, "stdout", target)
            code = run(["pipe", *map(str, [*options, "--no-self-check", *args])])
        return SimpleNamespace(code=code, err=capfd.readouterr().err)

    return call


def make_text(num_lines, seed=0):
    generator = random.Random(seed)
    lines = [
        f"{i} {' '.join(generator.choices(WORDS, k=generator.randint(0, 9)))}"
        for i in range(num_lines)
    ]
    return "".join(f"{line.strip()}\n" for line in lines)


def make_captions(num_cues):
    """WebVTT that rolls: each line is shown again in the cue behind it, and counts once."""
    cues = ["WEBVTT\n"]
    for i in range(num_cues):
        begin, end = (f"00:{s // 60:02d}:{s % 60:02d}.000" for s in (i, i + 1))
        cues.append(f"{begin} --> {end}\n<v Ann>line {i}\n<v Ann>line {i + 1}\n")
    return "\n".join(cues)


def killed_and_resumed(program, args, out, total, kills, seed):
    """Run to the end, killed after a random amount of output each time; returns how often."""
    generator, num_killed = random.Random(seed), 0
    while True:
        begun = size = size_of(out)
        child = program.start(*args, out=out)
        if num_killed < kills:
            # Within the next of as many parts of what is left as there are runs to come.
            wanted = begun + generator.random() * (total - begun) / (kills - num_killed + 1)
            deadline = time.monotonic() + PATIENCE
            while size < wanted and time.monotonic() < deadline:
                time.sleep(0.002)
                size = size_of(out)
            time.sleep(generator.uniform(0, 0.03))
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        code = program.wait()
        if code == -signal.SIGKILL:
            num_killed += 1
        else:
            assert code == 0
            return num_killed


MODES = {
    "score": (make_text(300), ["--mode", "score", "--json"]),
    "captions": (make_captions(250), ["--mode", "score"]),
    "reply": (
        make_text(25),
        ["--mode", "reply", "--max-new", "8", "--temperature", "1.5", "--seed", "7"],
    ),
    "notes": (make_text(150), ["--mode", "notes", "--json", "--max-new", "6"]),
    "filter": (
        make_text(150) + 400 * "a line that is long " + "\n" + make_text(150),
        ["--mode", "filter", "--min", "0sd"],
    ),
    "turns": (
        "".join(
            f"{'AB'[n // 3 % 2]}: {line}"
            for n, line in enumerate(make_text(60).splitlines(keepends=True))
        ),
        ["--mode", "reply", "--by", "turn", "--max-new", "4", "--json"],
    ),
    "rolled": (
        make_text(150),
        ["--mode", "notes", "--json", "--max-new", "6", "--carry", "1", "--roll-up", "2"],
    ),
}


@posix_only
@pytest.mark.parametrize("mode", MODES)
def test_killed_and_resumed_it_says_what_one_run_says(program, tmp_path, mode):
    """No line twice, none lost, no digit different."""
    text, args = MODES[mode]
    source = tmp_path / "input"
    source.write_text(text)
    args = [*args, "--window", 200, source]
    assert program(*args, out=tmp_path / "one") == 0
    expected = (tmp_path / "one").read_bytes()
    assert expected.count(b"\n") >= 20
    args += ["--session", f"killed-{mode}", "--resume", "--save-every", "500tok"]
    out = tmp_path / "out"
    assert killed_and_resumed(program, args, out, len(expected), kills=2, seed=1) == 2
    assert out.read_bytes() == expected


@posix_only
@pytest.mark.slow
def test_killed_at_20_random_moments_over_a_megabyte(program, tmp_path):
    """The same as above, as long as an issue asked for."""
    source = tmp_path / "input"
    source.write_text(make_text(38_000))
    assert source.stat().st_size > 1_000_000
    args = ["--mode", "score", "--window", 60, source]
    assert program(*args, out=tmp_path / "one") == 0
    expected = (tmp_path / "one").read_bytes()
    args += ["--session", "killed", "--resume", "--save-every", "1s"]
    out = tmp_path / "out"
    assert killed_and_resumed(program, args, out, len(expected), kills=20, seed=2) == 20
    assert out.read_bytes() == expected


@posix_only
def test_a_killed_listener_has_heard_each_line_once(program, tmp_path):
    """Log and state are those of one run, to the last bit; the log finds what has left."""
    source = tmp_path / "input"
    text = make_text(400)
    source.write_text(text)
    args = ["--mode", "listen", "--json", "--window", 200, source]
    assert program(*args, "--session", "one", out=tmp_path / "one") == 0
    sessions = Sessions(program.data)
    path = sessions.find("one") / "log.sqlite"
    args += ["--session", "killed-listen", "--resume", "--save-every", "700tok"]
    generator, num_killed = random.Random(3), 0
    code = None
    while code != 0:
        child = program.start(*args, out=tmp_path / "out")
        if num_killed < 2:
            wanted = generator.randrange(1, 120) + 120 * num_killed
            killed = sessions.folder / "killed-listen" / "log.sqlite"
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline and num_logged(killed) < wanted:
                time.sleep(0.002)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        code = program.wait()
        num_killed += code == -signal.SIGKILL
    assert num_killed == 2
    with Log(path) as one, Log(killed) as other:
        expected, got = (
            [replace(passage, created=0.0, id=0) for passage in log.passages()]
            for log in (one, other)
        )
        found = search(other, "399")
        last_id = other.last_id()
    assert [passage.text for passage in got] == text.splitlines()
    assert got == expected
    assert [(r.passage.first_line, r.passage.role) for r in found] == [(400, "input")]
    states = [load(log.with_name("state.safetensors")) for log in (path, killed)]
    assert states[0].tensors.keys() == states[1].tensors.keys()
    for name, tensor in states[0].tensors.items():
        assert torch.equal(tensor, states[1].tensors[name])
    own = states[1].meta["own"]
    assert own["last_id"] == last_id
    assert own["position_offset"] + states[1].meta["stream"]["num_seen"] == (
        got[-1].last_position + 1
    )


def num_logged(path):
    """Passages of another process's log; 0 before it is made."""
    try:
        with Log(path, read_only=True) as log:
            return log.num_passages()
    except SessionError:
        return 0


# Signals


@posix_only
@pytest.mark.parametrize(
    ("mode", "number", "code"),
    [
        ("score", "SIGTERM", 143),
        ("reply", "SIGINT", 130),
        ("notes", "SIGHUP", 129),
    ],
    ids=["score", "reply", "notes"],
)
def test_a_stopped_run_goes_on_as_though_it_had_not_stopped(program, tmp_path, mode, number, code):
    """A checkpoint at once; the last note and the half answer that a stop makes do not stay."""
    text, args = MODES[mode]
    source = tmp_path / "input"
    source.write_text(text)
    args = [*args, "--window", 200, source]
    assert program(*args, out=tmp_path / "one") == 0
    expected = (tmp_path / "one").read_bytes()
    for attempt in range(5):  # on a busy machine it may have ended before it is stopped
        name = f"stopped-{mode}-{attempt}"
        session = ["--session", name, "--resume", "--save-every", "60m"]
        out, err = tmp_path / name, tmp_path / f"{name}.err"
        child = program.start(*args, *session, out=out, err=err)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and size_of(out) < len(expected) / 4:
            time.sleep(0.002)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, getattr(signal, number))
        got = program.wait()
        if got != 0:
            break
    assert got == code
    assert "saved: --session" in err.read_text()
    state = load(Sessions(program.data).find(name) / "state.safetensors")
    assert 0 < state.meta["own"]["pipe"]["place"]["num_lines"] < text.count("\n")
    assert program(*args, *session, out=out) == 0
    assert out.read_bytes() == expected


def size_of(path):
    return path.stat().st_size if path.exists() else 0


@posix_only
def test_nohup_is_respected(undisturbed):
    """A hang-up that is ignored when the program begins is ignored to the end."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    StopRequest(lambda: None, tuple(EXIT_CODES))
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    stop = StopRequest(lambda: None, tuple(EXIT_CODES))
    os.kill(os.getpid(), signal.SIGHUP)
    assert (stop(), stop.exit_code) == (True, 129)


# Live input: nothing is passed over


def said(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@posix_only
def test_a_meeting_goes_on_with_what_comes(program, tmp_path):
    """Lines are numbered on, and text without a note is covered by the first note afterwards."""
    source, out = tmp_path / "input", tmp_path / "out"
    os.mkfifo(source)
    args = ["--mode", "notes", "--json", "--max-new", 6, "--window", 300]
    args += ["--session", "mtg", "--resume", "--save-every", "1tok"]
    child = program.start(*args, out=out, stdin=source)
    with source.open("w") as writer:
        writer.write("one\ntwo\nthree\n")
        writer.flush()
        state = Sessions(program.data).folder / "mtg" / "state.safetensors"
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and num_lines_of(state) < 3:
            time.sleep(0.01)
        os.kill(child, signal.SIGKILL)
        assert program.wait() == -signal.SIGKILL
    assert [event["event"] for event in said(out)] == ["start"]
    program.start(*args, out=out, stdin=source)
    with source.open("w") as writer:
        writer.write("four\nfive\n")
    assert program.wait() == 0
    events = said(out)
    assert [event["event"] for event in events] == ["start", "note", "end"]
    assert (events[1]["first_line"], events[1]["last_line"]) == (1, 5)
    assert events[-1]["lines"] == 5
    # What was said at the end of a live input stays, and the next note covers what is new.
    program.start(*args, out=out, stdin=source)
    with source.open("w") as writer:
        writer.write("six\n")
    assert program.wait() == 0
    notes = [event for event in said(out) if event["event"] == "note"]
    assert [(n["number"], n["first_line"], n["last_line"]) for n in notes] == [(1, 1, 5), (2, 6, 6)]
    assert [event["event"] for event in said(out)] == ["start", "note", "note", "end"]


def num_lines_of(path):
    try:
        return load(path).meta["own"]["pipe"]["place"]["num_lines"]
    except SessionError:
        return 0


@posix_only
def test_a_killed_listener_keeps_what_it_heard_of_a_live_input(program, tmp_path):
    """The log is ahead of the state: what is in it is fed from it, for it does not come again."""
    source, out = tmp_path / "input", tmp_path / "out"
    os.mkfifo(source)
    args = ["--mode", "listen", "--window", 300, "--session", "heard", "--resume"]
    child = program.start(*args, out=out, stdin=source)
    log = Sessions(program.data).folder / "heard" / "log.sqlite"
    with source.open("w") as writer:
        writer.write("WEBVTT\n\n00:01.000 --> 00:02.000\n<v Ann>the ship\n\n")
        writer.write("00:03.000 --> 00:04.000\n<v Bob>the harbour\n\n")
        writer.flush()
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and num_logged(log) < 2:
            time.sleep(0.01)
        os.kill(child, signal.SIGKILL)
        assert program.wait() == -signal.SIGKILL
    assert num_lines_of(log.with_name("state.safetensors")) == 0
    program.start(*args, out=out, stdin=source)
    with source.open("w") as writer:
        writer.write("the sails\n")
    assert program.wait() == 0
    with Log(log) as opened:
        passages = list(opened.passages())
    assert [(p.speaker, p.text) for p in passages] == [
        ("Ann", "the ship"),
        ("Bob", "the harbour"),
        (None, "the sails"),
    ]
    assert [(p.first_line, p.start_time) for p in passages] == [(4, 1.0), (7, 3.0), (8, None)]
    own = load(log.with_name("state.safetensors")).meta
    fed = "Ann: the ship\nBob: the harbour\nthe sails\n"
    assert own["stream"]["recent_ids"][-len(fed) :] == [3 + b for b in by_alphabet(fed)]
    assert passages[-1].last_position + 1 == own["stream"]["num_seen"]


def by_alphabet(text):
    """Ids of the byte tokenizer, without its special tokens."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    encoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((encoded, _),) = encoder.pre_tokenize_str(text)
    return [alphabet.index(char) for char in encoded]


# What does not fit together


@pytest.fixture
def begun(pipe, tmp_path):
    """A session over a file that has been read to its end."""
    source = tmp_path / "input"
    source.write_text(make_text(60))
    done = pipe("--mode", "score", "--session", "tea", source)
    assert done.code == 0
    assert "saved: --session tea --resume goes on from here" in done.err
    return source


def state_of(tmp_path, name="tea"):
    return Sessions(tmp_path / "data").folder / name / "state.safetensors"


def test_a_checkpoint_is_not_overwritten_by_accident(pipe, begun, tmp_path):
    before = state_of(tmp_path).read_bytes()
    done = pipe("--mode", "score", "--session", "tea", begun)
    assert done.code == 2
    assert "session tea has a checkpoint: --resume goes on from it" in done.err
    assert state_of(tmp_path).read_bytes() == before


def test_resumed_at_its_end_it_says_nothing_twice(pipe, begun, tmp_path):
    """And a file that has grown meanwhile is read on."""
    before = (tmp_path / "out").read_bytes()
    assert pipe("--mode", "score", "--session", "tea", "--resume", begun).code == 0
    assert (tmp_path / "out").read_bytes() == before
    with begun.open("a") as file:
        file.write("the whale\n")
    assert pipe("--mode", "score", "--session", "tea", "--resume", begun).code == 0
    lines = (tmp_path / "out").read_text().splitlines()
    assert len(lines) == 61
    assert lines[-1].endswith("\tthe whale")


@pytest.mark.parametrize(
    ("args", "sizes", "problem"),
    [
        (["--mode", "notes"], ["--window", "60"], "mode was score, is notes"),
        (["--mode", "score"], ["--window", "50"], "window_size was 60, is 50"),
        (["--mode", "score", "--dtype", "bfloat16"], ["--window", "60"], "dtype was float32"),
        (["--mode", "score", "--json"], ["--window", "60"], "--json was False, is True"),
        (["--mode", "score", "--format", "srt"], ["--window", "60"], "--format was auto, is srt"),
        (["--mode", "score", "--policy", "h2o"], ["--window", "60"], "policy was sink, is h2o"),
    ],
)
def test_other_options_are_refused_by_name(pipe, begun, tmp_path, args, sizes, problem):
    """One line, and nothing is changed."""
    before = state_of(tmp_path).read_bytes(), (tmp_path / "out").read_bytes()
    extra = ["--max-new", "6"] if "notes" in args else []
    sizes = ["--window", "200"] if "notes" in args else sizes
    done = pipe(*args, *extra, "--session", "tea", "--resume", begun, sizes=sizes)
    assert done.code == 2
    refusals = [line for line in done.err.splitlines() if "cannot go on as it was" in line]
    assert len(refusals) == 1
    assert problem in refusals[0]
    assert (state_of(tmp_path).read_bytes(), (tmp_path / "out").read_bytes()) == before


def test_an_automatic_window_stays_as_it_was(pipe, tmp_path, monkeypatch):
    """Whatever memory is free when the run goes on."""
    source = tmp_path / "input"
    source.write_text("one\n")
    args = ["--mode", "score", "--session", "wide", "--resume", source]
    assert "4 pinned + 4,092 newest (auto)" in pipe(*args, sizes=("--window", "auto")).err
    monkeypatch.setattr(fit, "AUTO_SHARE", 0.0)
    done = pipe(*args, sizes=("--window", "auto"))
    assert done.code == 0
    assert "4 pinned + 4,092 newest" in done.err


def test_another_model_is_refused(pipe, begun, tmp_path, tiny_folder, monkeypatch):
    """The same name, other weights."""
    saved = load(state_of(tmp_path))
    save(state_of(tmp_path), replace(saved, fingerprint={**saved.fingerprint, "weights": "abc"}))
    done = pipe("--mode", "score", "--session", "tea", "--resume", begun)
    assert done.code == 2
    assert "weights was abc" in done.err


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda text: text.replace("\n3 ", "\n4 ", 1), "it differs in line 60 or above"),
        (lambda text: text[: text.rindex("\n", 0, -1)] + "\nelse\n", "it differs in line 60"),
        (lambda text: "".join(text.splitlines(keepends=True)[:20]), "it ends in line 20, and"),
        (lambda _text: "", "it ends in line 0, and line 60 was read"),
    ],
    ids=["an early line", "the last line", "shorter", "empty"],
)
def test_another_input_is_refused(pipe, begun, tmp_path, change, problem):
    """Before anything is cut off or written."""
    with (tmp_path / "out").open("a") as file:
        file.write("behind the checkpoint\n")
    before = state_of(tmp_path).read_bytes(), (tmp_path / "out").read_bytes()
    begun.write_text(change(begun.read_text()))
    done = pipe("--mode", "score", "--session", "tea", "--resume", begun)
    assert done.code == 1
    assert f"the input is not the one that session tea has read: {problem}" in done.err
    assert (state_of(tmp_path).read_bytes(), (tmp_path / "out").read_bytes()) == before


@posix_only
def test_a_pipe_in_the_place_of_a_file_is_refused(pipe, begun, tmp_path):
    """It cannot be compared, and its lines would be fed twice."""
    read_end, write_end = os.pipe()
    os.write(write_end, begun.read_bytes())
    os.close(write_end)
    done = pipe("--mode", "score", "--session", "tea", "--resume", stdin=f"/dev/fd/{read_end}")
    os.close(read_end)
    assert done.code == 2
    assert "input was a file, is a pipe" in done.err


@posix_only
def test_files_and_a_pipe_together_have_no_place(pipe, begun):
    read_end, write_end = os.pipe()
    os.close(write_end)
    done = pipe("--mode", "score", "--session", "x", begun, "-", stdin=f"/dev/fd/{read_end}")
    os.close(read_end)
    assert done.code == 2
    assert "--session takes files, or what comes through a pipe, but not both" in done.err


@pytest.mark.parametrize("args", [["--resume"], ["--mode", "listen"]])
def test_what_needs_a_session_says_so(pipe, args):
    done = pipe(*args)
    assert done.code == 2
    assert done.err == f"streamchat: {' '.join(args)} needs --session NAME\n"


def test_a_chat_is_no_pipe(pipe, begun, tmp_path):
    saved = load(state_of(tmp_path))
    meta = {**saved.meta, "own": {"mode": "chat"}}
    save(state_of(tmp_path), replace(saved, meta=meta))
    done = pipe("--mode", "score", "--session", "tea", "--resume", begun)
    assert done.code == 2
    assert "session tea was saved by chat" in done.err


def test_a_session_in_use_is_refused(pipe, begun, tmp_path):
    with Sessions(tmp_path / "data").open("tea"):
        done = pipe("--mode", "score", "--session", "tea", "--resume", begun)
    assert done.code == 1
    assert "session tea is in use by another process" in done.err


def test_a_damaged_state_is_put_aside(pipe, begun, tmp_path):
    """With the reason, and what comes next: nothing is begun anew without a word."""
    path = state_of(tmp_path)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    written_before = (tmp_path / "out").read_bytes()
    done = pipe("--mode", "score", "--session", "tea", "--resume", begun)
    assert done.code == 1
    assert "its checksum does not match; it is now state.safetensors.damaged-1" in done.err
    assert "the next run of session tea begins at the start of the input" in done.err
    assert path.with_name("state.safetensors.damaged-1").read_bytes() == bytes(data)
    assert (tmp_path / "out").read_bytes() == written_before
    fresh = tmp_path / "fresh"
    assert pipe("--mode", "score", "--session", "tea", "--resume", begun, out=fresh).code == 0
    assert fresh.read_bytes() == written_before


def test_a_damaged_log_is_put_aside(pipe, tmp_path):
    source = tmp_path / "input"
    source.write_text("the ship\n")
    args = ["--mode", "listen", "--session", "ear", "--resume", source]
    sizes = ["--window", "200"]
    assert pipe(*args, sizes=sizes).code == 0
    log = state_of(tmp_path, "ear").with_name("log.sqlite")
    log.write_bytes(b"PK" + log.read_bytes()[2:])
    done = pipe(*args, sizes=sizes)
    assert done.code == 1
    assert "it is now log.sqlite.damaged-1, and the next run of session ear goes on" in done.err
    with source.open("a") as file:
        file.write("the harbour\n")
    assert pipe(*args, sizes=sizes).code == 0
    with Log(log) as opened:
        assert [passage.text for passage in opened.passages()] == ["the harbour"]


# The disk


def test_a_folder_that_cannot_be_written_is_one_line(
    pipe,
    unprivileged,  # noqa: F811 - a fixture
    monkeypatch,
):
    monkeypatch.setenv(FOLDER_VARIABLE, str(unprivileged))
    source = unprivileged / "input"
    source.write_text("line\n")
    unprivileged.chmod(0o500)
    done = pipe("--mode", "score", "--session", "x", source, out=os.devnull)
    unprivileged.chmod(0o700)
    assert done.code == 1
    assert done.err.startswith("streamchat: cannot open session x in")
    assert done.err.count("\n") == 1


def fail_to_save(monkeypatch, which):
    """There is no room for these attempts to save, counted from 1."""
    count = 0

    def save_or_fail(path, state):
        nonlocal count
        count += 1
        if count in which:
            raise SessionError(f"cannot save the state to {path}: No space left on device")
        save(path, state)

    monkeypatch.setattr(checkpoint, "save", save_or_fail)


def test_a_disk_that_is_full_for_a_while_costs_a_line(pipe, begun, tmp_path, monkeypatch):
    """The run goes on, and is saved when there is room again."""
    before = (tmp_path / "out").read_bytes()
    fail_to_save(monkeypatch, range(3, 5))
    out = tmp_path / "new"
    args = ["--mode", "score", "--session", "x", "--save-every", "1tok", begun]
    done = pipe(*args, out=out)
    assert done.code == 0
    assert done.err.count("No space left on device; the run goes on") == 1
    assert "saved: --session x" in done.err
    assert out.read_bytes() == before


def test_a_disk_that_stays_full_is_told_by_the_exit_code(pipe, begun, tmp_path, monkeypatch):
    """What was saved before is still there."""
    fail_to_save(monkeypatch, range(2, 1000))
    done = pipe("--mode", "score", "--session", "x", begun, out=tmp_path / "new")
    assert done.code == 1
    assert done.err.count("No space left on device; the run goes on") == 1
    assert "saved:" not in done.err
    assert (tmp_path / "new").read_bytes() == (tmp_path / "out").read_bytes()
    assert load(state_of(tmp_path, "x")).meta["own"]["pipe"]["place"]["num_lines"] == 0


def test_a_disk_that_is_full_from_the_start_ends_it(pipe, begun, small_disk, tmp_path):  # noqa: F811
    """Before anything is read."""
    small_disk(2000)
    done = pipe("--mode", "score", "--session", "x", begun, out=os.devnull)
    small_disk(1 << 30)
    assert done.code == 1
    assert done.err.count("cannot save the state to") == 1


# The output


def test_another_output_is_told_what_comes(pipe, begun, tmp_path):
    """It is not cut, and begins with the line that the checkpoint stands behind."""
    args = ["--mode", "score", "--json", "--session", "j", begun]
    assert pipe(*args, out=tmp_path / "first").code == 0
    with begun.open("a") as file:
        file.write("the whale\n")
    other = tmp_path / "other"
    other.write_text('{"event": "else"}\n')
    done = pipe(*args, "--resume", out=other)
    assert done.code == 0
    assert "goes on after line 60; what was written after that comes again" in done.err
    events = said(other)
    assert [event["event"] for event in events] == ["else", "resume", "score", "end"]
    assert events[1]["line"] == 60
    assert events[2]["line"] == 61
    assert events[3]["lines"] == 61


def test_a_mark_finds_its_place_again(tmp_path):
    """Appending or not; behind it all is cut off, and only in the same file."""
    path = tmp_path / "out"
    for mode in ("ab", "r+b"):
        path.write_bytes(b"before\n")
        with path.open(mode, buffering=0) as file:
            file.seek(0, 2)
            file.write(b"one\n")
            marked = written.mark(file.fileno())
            file.write(b"two\n")
        with path.open(mode, buffering=0) as file:
            assert written.cut(file.fileno(), marked)
            file.write(b"three\n")
        assert path.read_bytes() == b"before\none\nthree\n"
    path.write_bytes(b"short")
    other = tmp_path / "other"
    other.write_bytes(b"as long as before, or longer\n")
    for target in (path, other):
        before = target.read_bytes()
        with target.open("ab", buffering=0) as file:
            assert not written.cut(file.fileno(), marked)
        assert target.read_bytes() == before


@posix_only
def test_a_pipe_has_no_mark():
    read_end, write_end = os.pipe()
    assert written.mark(write_end) is None
    os.close(read_end)
    os.close(write_end)


# The place in the input


def test_a_place_depends_on_all_that_was_taken():
    """And not on where the input lies, nor on how it was taken."""
    pieces = [Piece("one", 1, 1, True), Piece("two", 2, 1, False), Piece("", 2, 2, True)]

    def at(taken):
        place = Place()
        place.add(taken)
        return place

    whole = at(pieces)
    step = Place()
    for piece in pieces:
        step.add([replace(piece, origin=Origin(file="a.txt", file_line=1))])
    assert step.is_at(whole)
    assert (whole.num_pieces, whole.last_line) == (3, 2)
    changes = [
        [*pieces[:2]],
        [pieces[0], pieces[2], pieces[1]],
        [replace(pieces[0], text="One"), *pieces[1:]],
        [replace(pieces[0], lead="Ann: "), *pieces[1:]],
        [pieces[0], replace(pieces[1], ends_line=True), pieces[2]],
    ]
    assert not any(at(changed).is_at(whole) for changed in changes)
    resumed = Place(**json.loads(json.dumps({"num_pieces": 1, "digest": at(pieces[:1]).digest})))
    resumed.add(pieces[1:])
    assert resumed.is_at(whole)
