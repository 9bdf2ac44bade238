"""Kept chats as their users meet them: killed, hung up, gone on with; nothing kept where asked.

The oracle for what is said after a break is the same conversation without one, and without the
program around it.
"""

import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from test_chat import (  # noqa: F401 - fixtures among them
    MAX_NEW,
    PROGRAM,
    PROMPT,
    WAIT_SECONDS,
    WINDOW,
    FakeChat,
    _one_thread,
    answers_to,
    environment,
    home,
    letters,
    model,
    options,
    repl_for,
    run_program,
    screen_console,
    terminal,
)

from streamchat import CacheConfig, SamplingConfig
from streamchat.chat.conversation import Conversation
from streamchat.cli.options import REPEAT_PENALTY_DEFAULT
from streamchat.store.folder import Sessions
from streamchat.store.log import Log
from streamchat.store.state import load as load_state

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="pipes, signals and ptys of POSIX"),
    pytest.mark.slow,  # many starts of the real program: minutes
]

ENDLESS = ["--max-new", "1000000"]


@pytest.fixture
def data(tmp_path, environment):  # noqa: F811 - the fixture
    """A folder of sessions for one test, and the environment that names it."""
    return tmp_path / "data", environment | {"STREAMCHAT_DATA": str(tmp_path / "data")}


def said(root, name):
    """Roles and texts of a session's log."""
    with Log(Sessions(root).find(name) / "log.sqlite", read_only=True) as log:
        return [(passage.role, passage.text) for passage in log.passages()]


def answering(chat):
    """Wait for the first words of an answer; the status line is there before them."""
    chat.until(lambda: re.search(r"[1-9][\d.,]* tok/s", chat.text()), "an answer")


def wait_for(chat, root, name, number):
    """Until so many passages are on the disk."""

    def are_there():
        try:
            return len(said(root, name)) >= number
        except Exception:
            return False  # it is just being made

    chat.until(are_there, f"{number} passages in the log")


def end_of(chat):
    """Read to the end; the exit code."""
    chat.until(lambda: not chat._read(), "the end")
    chat.child.close()
    return chat.child.exitstatus


def idle(chat):
    chat.until(chat.is_idle, "an idle prompt")


def test_a_chat_that_was_killed_goes_on(letters, model, data):  # noqa: F811
    """Killed at the prompt; the same session is refused before, and gone on with after."""
    root, environment = data  # noqa: F811
    args = ["chat", "--session", "tea", *options(letters)]
    with terminal(args, environment) as chat:
        idle(chat)
        chat.enter("Hello")
        chat.see("session tea (new)")
        wait_for(chat, root, "tea", 2)
        second = run_program(["chat", "--session", "tea"], "More\n", environment)
        assert second.returncode == 1
        assert second.stdout == b""
        words = second.stderr.decode()
        assert words == "streamchat: session tea is in use by another process\n"
        chat.enter("Is it?")
        wait_for(chat, root, "tea", 4)
        chat.child.kill(signal.SIGKILL)
        end_of(chat)
    done = run_program(["chat", "-c"], "More\nAnd more\n", environment)
    assert done.returncode == 0
    expected = answers_to(model, ["Hello", "Is it?", "More", "And more"])
    assert done.stdout.decode().splitlines() == expected[2:]
    assert "letters on cpu" in done.stderr.decode()
    assert "session tea (2 turns)" in done.stderr.decode()
    assert [text for role, text in said(root, "tea") if role == "assistant"] == expected
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*")}
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in modes.items())


@pytest.mark.parametrize(
    ("term", "number", "code"),
    [("xterm-256color", signal.SIGTERM, 143), ("dumb", signal.SIGHUP, 129)],
)
def test_a_signal_at_the_prompt_ends_with_its_code(letters, data, term, number, code):  # noqa: F811
    """What was said is kept; with prompt-toolkit's prompt and with the plain one."""
    root, environment = data  # noqa: F811
    environment = environment | {"TERM": term}
    with terminal(["chat", "--session", "tea", *options(letters)], environment) as chat:
        chat.see(PROMPT)
        chat.send("Hello\r")
        wait_for(chat, root, "tea", 2)
        chat.until(lambda: chat.num_prompts() == 2, "the next prompt")
        chat.child.kill(number)
        assert end_of(chat) == code
    assert [role for role, _ in said(root, "tea")] == ["user", "assistant"]
    assert (root / "sessions" / "tea" / "state.safetensors").exists()
    assert "Traceback" not in chat.text()


def test_a_signal_between_prompt_and_reading_is_not_lost(monkeypatch, tmp_path):
    """It comes before the plain prompt is written, or while it is: nothing waits for a key."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("builtins.input", lambda: pytest.fail("waits for a key"))
    for number in (0, 1):
        console = screen_console(80)
        repl = repl_for(FakeChat([]), console)
        monkeypatch.setattr(repl._prompt, "_session", None)
        if number:
            monkeypatch.setattr(console.file, "write", lambda _text, repl=repl: repl.leave())
        else:
            repl.leave()
        assert repl._read() is None
    repl.run()


def test_a_hang_up_in_an_answer_keeps_what_was_said(letters, data):  # noqa: F811
    """Its token is finished, the partial answer is in the log, and the state has it."""
    root, environment = data  # noqa: F811
    with terminal(["chat", "--session", "tea", *options(letters, *ENDLESS)], environment) as chat:
        idle(chat)
        chat.send("Hello\r")
        answering(chat)
        chat.child.kill(signal.SIGHUP)
        assert end_of(chat) == 129
    (_, (role, text)) = said(root, "tea")
    assert role == "assistant"
    assert re.fullmatch("[a-z ]+", text)
    saved = load_state(root / "sessions" / "tea" / "state.safetensors")
    assert saved.meta["own"]["last_id"] == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_piped_turns_and_keeps_them(letters, data, number, code):  # noqa: F811
    """The partial answer is on standard output and in the log, the same."""
    root, environment = data  # noqa: F811
    with subprocess.Popen(
        [*PROGRAM, "chat", "--session", "tea", *options(letters, *ENDLESS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=environment,
    ) as program:
        program.stdin.write(b"Hello\n")
        program.stdin.flush()
        begin = program.stdout.read(10)
        program.send_signal(number)
        rest, words = program.communicate(timeout=WAIT_SECONDS)
    assert program.returncode == code
    assert said(root, "tea") == [("user", "Hello"), ("assistant", (begin + rest).decode()[:-1])]
    assert b"Traceback" not in words


def test_an_interrupted_answer_is_kept_and_sessions_are_changed(letters, data):  # noqa: F811
    """Ctrl-C, `/save`, `/load`, `/undo` on a terminal; then all of it is on the disk."""
    root, environment = data  # noqa: F811
    with terminal(["chat", *options(letters, *ENDLESS)], environment) as chat:
        idle(chat)
        before = chat.num_prompts()
        chat.send("Hello\r")
        answering(chat)
        chat.send("\x03")
        chat.until(lambda: chat.num_prompts() > before and chat.is_idle(), "the prompt")
        assert "saved as session other" in chat.enter("/save other")
        chat.enter(f"/set max_new {MAX_NEW}")
        chat.enter("More")
        assert "turn 2 taken back" in chat.enter("/undo")
        assert "session other, 1 turn" in chat.enter("/load other")
        chat.enter("Elsewhere")
        assert "there is no session 'missing'" in chat.enter("/load missing")
        assert chat.leave() == 0
    (own,) = [name for name in Sessions(root).names() if name != "other"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-\d{4}", own)
    assert [text for role, text in said(root, own) if role == "user"] == ["Hello"]
    questions = [text for role, text in said(root, "other") if role == "user"]
    assert questions == ["Hello", "Elsewhere"]
    assert said(root, "other")[1] == said(root, own)[1]


def files_under(folder):
    return {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def test_no_log_writes_nothing(letters, data, home):  # noqa: F811
    """Neither a session nor what was typed, in any file of the user's."""
    root, environment = data  # noqa: F811
    with terminal(["chat", "--no-log", *options(letters)], environment) as chat:
        idle(chat)
        chat.until(lambda: f"/{WINDOW + 6}" in chat.screen.display[-1], "the model")
        before = files_under(home)
        chat.enter("A secret")
        chat.see("not logged")
        assert "not logged (--no-log)" in chat.enter("/save here")
        assert chat.leave() == 0
    assert files_under(home) == before
    assert not root.exists()


def test_a_sampled_chat_in_two_processes_is_one_chat(letters, model, data):  # noqa: F811
    """The same words as in one, with the seed given once, after the window has wrapped."""
    root, environment = data  # noqa: F811
    questions = [f"question {index}" for index in range(8)]
    sampling = SamplingConfig(
        temperature=1.0, top_p=0.9, top_k=20, repetition_penalty=REPEAT_PENALTY_DEFAULT, seed=5
    )
    config = CacheConfig(window_size=WINDOW)
    whole = Conversation(model, cache=config, sampling=sampling, max_new_tokens=MAX_NEW)
    for question in questions:
        list(whole.say(question))
    more = ["--seed", "5", "--temperature", "1", "--top-p", "0.9", "--top-k", "20"]
    for begin, args in ((0, options(letters, *more)), (6, [])):
        lines = "\n".join(questions[begin : begin + 6])
        done = run_program(["chat", "--session", "tea", *args], lines, environment)
        assert done.returncode == 0
    answers = [text for role, text in said(root, "tea") if role == "assistant"]
    assert answers == [turn.answer for turn in whole.turns]
    assert whole.stream.stats().num_evicted > 0


def test_where_nothing_can_be_written(letters, data):  # noqa: F811
    """A session that was asked for is refused; otherwise the chat goes on, and says so."""
    _, environment = data  # noqa: F811
    environment = environment | {"STREAMCHAT_DATA": "/dev/null/data"}
    done = run_program(["chat", *options(letters)], "Hello\n", environment)
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 1
    words = done.stderr.decode()
    assert "streamchat: this chat is not logged: cannot " in words
    assert "; not logged\n" in words
    named = run_program(["chat", "--session", "tea", *options(letters)], "Hello\n", environment)
    assert named.returncode == 1
    assert named.stdout == b""
    assert named.stderr.decode().count("\n") == 1
    assert Path("/dev/null").is_char_device()
