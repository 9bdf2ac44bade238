"""The chat as its users meet it: the real program, on pipes and on a terminal.

The terminal is a pty with pyte behind it, so that what is asserted is what would be on the screen.
The model is a random one that is made to say small letters only and never ends an answer by itself.
Starting the program costs seconds: the tests of a running chat share one for each width, and each
begins and ends at an idle prompt.
"""

import base64
import io
import itertools
import json
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pyte
import pytest
import torch
from chats import PROGRAM, PROMPT, WAIT_SECONDS, Terminal, environment_in, terminal
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from streamchat import CacheConfig, SamplingConfig, load
from streamchat.chat.conversation import Conversation
from streamchat.chat.template import ChatTemplate
from streamchat.cli.chat import DEFAULT_TOP_P, interruptible
from streamchat.cli.options import REPEAT_PENALTY_DEFAULT
from streamchat.events import Prefilled, TextDelta, ThinkingDelta
from streamchat.ui import answer as answer_module
from streamchat.ui.answer import AnswerView
from streamchat.ui.cells import cells, wrap_once
from streamchat.ui.rows import Rows

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pipes, signals and ptys of POSIX")

WINDOW = 300
MAX_NEW = 20
LETTERS = "abcdefghijklmnopqrstuvwxyz"


# The program and its model


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """As in the program that is run: the numbers are then the same to the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def letters(tiny_folder, tmp_path_factory):
    """A copy of the tiny model whose logits are 0 but for small letters and the space.

    Of 27 random logits one is above 0: greedy answers are words, and end at the cap only.
    """
    folder = tmp_path_factory.mktemp("letters") / "letters"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_folder)
    model = LlamaForCausalLM.from_pretrained(tiny_folder)
    keep = tokenizer.convert_tokens_to_ids([*LETTERS, "\u0120"])
    weights = model.lm_head.weight.data
    others = torch.ones(len(weights), dtype=torch.bool)
    others[keep] = False
    weights[others] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def environment(home):
    editor = home / "editor"
    editor.write_text('#!/bin/sh\nprintf edited >> "$1"\n')
    editor.chmod(0o755)
    return environment_in(home) | {"VISUAL": str(editor)}


def options(folder, *more):
    greedy = ["--temperature", "0", "--max-new", str(MAX_NEW), "--window", str(WINDOW)]
    return ["-m", str(folder), *greedy, *more]


def run_program(args, stdin, environment):
    return subprocess.run(
        [*PROGRAM, *args],
        input=stdin.encode(),
        capture_output=True,
        env=environment,
        timeout=WAIT_SECONDS,
        check=False,
    )


@pytest.fixture(scope="module")
def model(letters):
    return load(str(letters), device="cpu", check=False)


def answers_to(model, questions, max_new=MAX_NEW):
    """What the chat should answer: the same conversation without the program around it."""
    sampling = SamplingConfig(top_p=DEFAULT_TOP_P, repetition_penalty=REPEAT_PENALTY_DEFAULT)
    config = CacheConfig(window_size=WINDOW)
    conversation = Conversation(model, cache=config, sampling=sampling, max_new_tokens=max_new)
    answers = []
    for question in questions:
        for _ in conversation.say(question):
            pass
        answers.append(conversation.turns[-1].answer)
    return answers


# On pipes


def test_piped_lines_are_answered_one_by_one(letters, model, environment):
    """Each line is a turn; stdout has the answers alone, a line each, stderr what is loaded.

    Oracle: the same turns without the program. FORCE_COLOR does not colour what is piped.
    """
    colored = environment | {"FORCE_COLOR": "1", "NO_COLOR": "1"}
    done = run_program(["chat", *options(letters)], "Hello\n\nWhat is it?\n", colored)
    assert done.returncode == 0
    expected = answers_to(model, ["Hello", "What is it?"])
    assert done.stdout.decode() == "".join(f"{answer}\n" for answer in expected)
    assert all(len(answer) == MAX_NEW for answer in expected)
    words = done.stderr.decode()
    assert "\x1b" not in words
    assert f"streamchat: letters on cpu, 6 pinned + {WINDOW} newest" in words


def test_a_stop_string_is_neither_shown_nor_remembered(letters, model, environment):
    """`--stop` with words from the middle of an answer, which come letter by letter.

    Oracle: the same chat in which the cap ends that answer right before them.
    """
    (whole,) = answers_to(model, ["Hello"])
    stop = whole[8:12]
    shown = whole[: whole.index(stop)]
    assert 0 < len(shown) < len(whole)
    done = run_program(
        ["chat", *options(letters), "--stop", stop, "--stop", "\nUser:"],
        "Hello\nMore\n",
        environment,
    )
    assert done.returncode == 0
    first, second = done.stdout.decode().splitlines()
    assert first == shown
    sampling = SamplingConfig(top_p=DEFAULT_TOP_P, repetition_penalty=REPEAT_PENALTY_DEFAULT)
    config = CacheConfig(window_size=WINDOW)
    capped = Conversation(model, cache=config, sampling=sampling, max_new_tokens=len(shown))
    list(capped.say("Hello"))
    capped.max_new_tokens = MAX_NEW
    list(capped.say("More"))
    assert second == capped.turns[-1].answer.partition(stop)[0]


def test_a_piped_answer_comes_before_the_next_line(letters, environment):
    """A program that asks and waits for the answer gets it; then the pipe's end ends the chat."""
    with subprocess.Popen(
        [*PROGRAM, "chat", *options(letters)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    ) as program:
        for question in (b"Hello\n", b"More\n"):
            program.stdin.write(question)
            program.stdin.flush()
            line = program.stdout.readline()
            assert len(line) == MAX_NEW + 1
        program.stdin.close()
        assert program.stdout.read() == b""
        assert program.wait(WAIT_SECONDS) == 0


def test_a_signal_ends_a_piped_answer_in_its_middle(letters, environment):
    """SIGINT while it answers: what was said is there, its line is ended, and the code is 130."""
    with subprocess.Popen(
        [*PROGRAM, "chat", *options(letters), "--max-new", "1000000"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as program:
        program.stdin.write(b"Hello\nNever answered\n")
        program.stdin.flush()
        begin = program.stdout.read(10)
        program.send_signal(signal.SIGINT)
        rest, words = program.communicate(timeout=WAIT_SECONDS)
    assert program.returncode == 130
    assert re.fullmatch(r"[a-z ]+\n", (begin + rest).decode())
    assert b"Traceback" not in words


def test_replies_as_json_lines(letters, environment):
    """`pipe --mode reply --json`: every line of stdout is an object; there is one for each line."""
    args = ["pipe", "--mode", "reply", "--json", "--prompt", "Translate.", *options(letters)]
    done = run_program(args, "un\n\ndeux\n", environment)
    assert done.returncode == 0
    events = [json.loads(line) for line in done.stdout.decode().splitlines()]
    assert [event["event"] for event in events] == ["start", "reply", "reply", "end"]
    assert [event["line"] for event in events[1:3]] == [1, 3]
    assert [event["question"] for event in events[1:3]] == ["un", "deux"]
    assert all(re.fullmatch("[a-z ]{1,20}", event["text"]) for event in events[1:3])
    assert events[0]["sink_size"] > len("Translate.")
    assert events[-1]["replies"] == 2


def test_notes_as_json_lines(letters, environment, tmp_path):
    """`pipe --json`, notes by default: objects that cover the file's lines from first to last."""
    file = tmp_path / "meeting.txt"
    file.write_text("".join(f"{i}: and so it went on.\n" for i in range(40)))
    args = ["pipe", "--json", "--prompt", "Note.", *options(letters), str(file)]
    done = run_program(args, "", environment)
    assert done.returncode == 0
    events = [json.loads(line) for line in done.stdout.decode().splitlines()]
    notes = [event for event in events if event["event"] == "note"]
    assert [event["event"] for event in events] == ["start", *["note"] * len(notes), "end"]
    assert len(notes) > 3
    assert (notes[0]["first_line"], notes[-1]["last_line"]) == (1, 40)
    for before, after in itertools.pairwise(notes):
        assert after["first_line"] == before["last_line"] + 1
    assert (events[-1]["notes"], events[-1]["unnoted"]) == (len(notes), 0)


# On a terminal


@pytest.fixture(scope="module")
def _chats():
    chats = {}
    yield chats
    for chat in chats.values():
        chat.end()


@pytest.fixture(params=[80, 40])
def chat(request, _chats, letters, environment):
    """A running chat with an idle prompt; a new one where a failed test has left it otherwise."""
    columns = request.param
    running = _chats.get(columns)
    if running is None or not running.child.isalive() or not running.is_idle():
        if running is not None:
            running.end()
        running = Terminal(["chat", *options(letters)], environment, columns=columns)
        _chats[columns] = running
        running.until(lambda: running.is_idle(), "an idle prompt")
    running.enter(f"/set max_new {MAX_NEW}")
    yield running
    if running.child.isalive() and not running.is_idle():
        running.end()


def test_the_prompt_is_there_before_the_model(letters, environment):
    """The first prompt comes at once: within 1.5 s, while the model is being loaded.

    The best of three starts, for a machine that has other things to do.
    """
    seconds = []
    for _ in range(3):
        started = time.monotonic()
        with terminal(["chat", *options(letters)], environment) as chat:
            chat.see(PROMPT)
            seconds.append(time.monotonic() - started)
            chat.see("loading the model")
            assert f"/{WINDOW + 6}" not in chat.text()
        if seconds[-1] < 1.5:
            break
    assert min(seconds) < 1.5


def test_a_question_is_answered_on_the_screen(chat):
    """An answer stands below its question; the toolbar tells how full the memory is."""
    shown = chat.enter("Hello there")
    rows = [row for row in shown.splitlines() if re.fullmatch("[a-z ]+", row)]
    assert len("".join(rows)) >= MAX_NEW - 2
    held = chat.stat("held")
    chat.until(lambda: f" {held}/{WINDOW + 6}" in chat.screen.display[-1], "the toolbar")
    assert "evicted" in chat.screen.display[-1]
    assert "^C stop" not in chat.text()


def test_a_status_line_is_there_while_it_answers(chat):
    """Below a growing answer stand used/size and speed, on one row; they go when it ends."""
    chat.enter("/set max_new 1500")
    rows = []

    def status():
        found = [row for row in chat.screen.display if "tok/s" in row]
        rows.extend(found)
        return found

    before = chat.num_prompts()
    chat.send("Tell me a story\r")
    chat.until(status, "the status line")
    chat.until(lambda: chat.num_prompts() > before and chat.is_idle(), "the end")
    assert re.search(rf"\d+/{WINDOW + 6} │ evicted [\d,]+ │ [\d,.]+ tok/s", rows[0])
    assert len(rows[0].rstrip()) < chat.screen.columns
    assert "tok/s" not in chat.text()
    assert "▌" not in chat.text()


def test_a_long_answer_is_shown_once_and_whole(chat, model):
    """Through many scrolled screens, no row of the answer is repeated, lost or cut off.

    Oracle: the same answer without the program; only spaces may have gone where a row ends.
    """
    chat.enter("/clear")
    chat.enter("/set max_new 2000")
    shown = chat.enter("A long one")
    rows = [row for row in shown.splitlines() if re.fullmatch("[a-z ]+", row)]
    assert len(rows) > chat.screen.lines - 10
    assert max(map(len, rows)) < chat.screen.columns
    (expected,) = answers_to(model, ["A long one"], 2000)
    assert re.fullmatch(" *".join(["", *rows, ""]), expected)
    assert "stopped at the cap" in shown


def test_slash_commands_answer(chat):
    """`/help` lists all, an unknown one says what to type, and the others tell their figures."""
    shown = chat.enter("/help")
    for name in ("/help", "/set", "/show", "/clear", "/regen", "/undo", "/cache", "/evicted"):
        assert re.search(rf"^{name}\b", shown, re.MULTILINE)
    assert "Ctrl-D" in shown
    assert chat.enter("/?").count("/evicted") == shown.count("/evicted")
    unknown = " ".join(chat.enter("/nonsense [red]").split())
    assert "unknown command '/nonsense', type /? for help" in unknown
    shown = " ".join(chat.enter("/cache").split())
    assert re.search(rf"\d+ of {WINDOW + 6} tokens held: \d pinned", shown)
    shown = chat.enter("/stats")
    for name in ("turns", "tokens fed", "held", "evicted", "cache"):
        assert re.search(rf"^{name} +[\d.,]+", shown, re.MULTILINE)
    shown = chat.enter("/show")
    assert re.search(r"^model +letters$", shown, re.MULTILINE)
    assert re.search(rf"^max_new +{MAX_NEW}$", shown, re.MULTILINE)
    assert "must be a number, got 'x'" in " ".join(chat.enter("/set top_p x").split())


def test_turns_are_taken_back_and_asked_again(chat):
    """`/undo` and `/regen` leave as many tokens fed as there were."""
    chat.enter("Hello")
    fed, turns = chat.stat("tokens fed"), chat.stat("turns")
    chat.enter("Once more")
    more = chat.stat("tokens fed")
    chat.enter("/regen")
    assert (chat.stat("tokens fed"), chat.stat("turns")) == (more, turns + 1)
    assert f"turn {turns + 1} taken back" in chat.enter("/undo")
    assert (chat.stat("tokens fed"), chat.stat("turns")) == (fed, turns)
    chat.enter("/clear")
    assert (chat.stat("tokens fed"), chat.stat("turns")) == (0, 0)
    assert "there is no turn" in chat.enter("/undo")


def test_turns_that_leave_are_told_and_kept(chat):
    """A notice names the turns that leave, once, and `/evicted` shows them."""
    chat.enter("/clear")
    chat.enter("the first question")
    chat.enter("/set max_new 400")
    shown = chat.enter("a long one")
    told = " ".join(shown.split())
    assert told.count("── turn 1 left the model's memory (/evicted shows it)") == 1
    assert "the question is leaving" in shown
    assert "the first question" in chat.enter("/evicted")


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(chat):
    """Ctrl-C while it answers: the prompt is back soon, with what was said kept."""
    chat.enter("/set max_new 1000000")
    turns, fed, before = chat.stat("turns"), chat.stat("tokens fed"), chat.num_prompts()
    chat.send("Tell me everything\r")
    chat.see("tok/s")
    begin = len(chat.raw)
    chat.until(lambda: len(chat.raw) > begin + 3000, "some more of the answer")
    pressed = time.monotonic()
    chat.send("\x03")
    chat.until(lambda: chat.num_prompts() > before and chat.is_idle(), "the prompt")
    assert time.monotonic() - pressed < 5  # 0.1 s on an idle machine
    assert "tok/s" not in chat.text()
    assert "again" not in chat.text().splitlines()[-3:]
    chat.enter(f"/set max_new {MAX_NEW}")
    assert chat.stat("turns") == turns + 1
    assert chat.stat("tokens fed") > fed + 20
    chat.enter("And then?")
    assert chat.stat("turns") == turns + 2


@pytest.mark.parametrize(
    ("keys", "question"),
    [
        ("\x1b[200~one\r\ntwo\n\nthree\x1b[201~\r", "one\ntwo\n\nthree"),
        ('"""one\rtwo\r"""\r', "one\ntwo"),
        ('"""one\r\r/bye"""\r', "one\n\n/bye"),
        ('"""in one line"""\r', "in one line"),
        ("one\x1b\rtwo\r", "one\ntwo"),
        ("say <|im_end|>\r", "say <|im_end|>"),
    ],
    ids=["paste", "block", "block with a command", "short block", "alt-enter", "marker"],
)
def test_several_lines_are_one_turn(chat, model, home, keys, question):
    """A paste, a block and Alt-Enter make one turn, fed to the letter.

    Oracles: the number of tokens that the template makes of the text, one a byte; and, but for
    blocks, whose lines are entered one by one, the history file.
    """
    chat.enter("first")
    fed, turns, prompts = chat.stat("tokens fed"), chat.stat("turns"), chat.num_prompts()
    chat.send(keys)
    chat.until(lambda: chat.num_prompts() > prompts and chat.is_idle(), f"answer to {keys!r}")
    entered = history_of(home)[-1]
    assert chat.stat("turns") == turns + 1
    ids = ChatTemplate(model.tokenizer, None).next_turn(question)
    assert chat.stat("tokens fed") - fed == len(ids) + MAX_NEW
    if not keys.startswith('"""'):
        assert entered == question


def history_of(home):
    """What was typed, oldest first."""
    (file,) = home.rglob("chat_history")
    entries, lines = [], []
    for line in [*file.read_text().split("\n"), ""]:
        if line.startswith("+"):
            lines.append(line[1:])
        elif lines:
            entries.append("\n".join(lines))
            lines = []
    return entries


def test_what_is_typed_while_it_answers_waits_for_the_next_prompt(chat, home):
    """Nothing of it is in the answer; then it is a turn like any other."""
    turns = chat.stat("turns")
    chat.enter("/set max_new 1500")
    before = chat.num_prompts()
    chat.send("the first\r")
    chat.see("tok/s")
    chat.send("the secont\x7fd\r")
    chat.until(lambda: chat.num_prompts() == before + 2 and chat.is_idle(), "two answers")
    assert history_of(home)[-2:] == ["the first", "the second"]
    assert chat.text().count("the second") == 1
    assert chat.stat("turns") == turns + 2


def test_ctrl_r_finds_what_was_typed(chat, home):
    """Enter takes what was found behind the prompt, a second one sends it."""
    chat.enter("something rare")
    turns, before = chat.stat("turns"), chat.num_prompts()
    chat.send("\x12")
    chat.see("I-search backward:")
    chat.send("rar")
    chat.see(f"{PROMPT} something rare\nI-search backward: rar")
    chat.send("\r")
    chat.until(lambda: "I-search" not in chat.text(), "the end of the search")
    chat.send("\r")
    chat.until(lambda: chat.num_prompts() > before and chat.is_idle(), "the answer")
    assert chat.stat("turns") == turns + 1
    assert history_of(home)[-2] == "something rare"


def test_tab_completes_commands_and_their_words(chat):
    """A command's name, then a setting's."""
    before = chat.num_prompts()
    chat.send("/sh\t")
    chat.see(f"{PROMPT} /show")
    chat.send("\x15/set tem\t")
    chat.see(f"{PROMPT} /set temperature")
    chat.send(" 0\r")
    chat.until(lambda: chat.num_prompts() > before and chat.is_idle(), "the answer")
    assert "temperature is now 0" in chat.since(before)


def test_ctrl_x_ctrl_e_edits_the_draft(chat, home):
    """What is saved is asked at once, shown, and in the history; /edit begins with it."""
    turns, before = chat.stat("turns"), chat.num_prompts()
    chat.send("a draft\x18\x05")
    chat.until(lambda: chat.num_prompts() > before + 1 and chat.is_idle(), "the answer")
    assert [row for row in chat.text().splitlines() if row.startswith(PROMPT)][-2] == (
        f"{PROMPT} a draft"
    )
    assert history_of(home)[-1] == "a draft\nedited"
    assert chat.stat("turns") == turns + 1
    assert "edited" in chat.enter("/edit")
    assert history_of(home)[-1] == "a draft\nedited\nedited"


def test_the_last_answer_is_copied(chat):
    """By OSC 52, whole."""
    rows = [row for row in chat.enter("Hello there").splitlines() if re.fullmatch("[a-z ]+", row)]
    shown = chat.enter("/copy")
    (code,) = re.findall(rb"\x1b\]52;c;([A-Za-z0-9+/=]+)\x07", chat.raw[-4000:])
    assert base64.b64decode(code).decode().replace(" ", "") == "".join(rows).replace(" ", "")
    assert "sent to the terminal's clipboard" in " ".join(shown.split())


def test_ctrl_c_on_an_empty_prompt_hints_and_twice_leaves(letters, environment):
    """One Ctrl-C says how to leave, a second one within two seconds does, with 0.

    The model is still being loaded: that keeps nobody.
    """
    with terminal(["chat", *options(letters)], environment) as chat:
        chat.see("loading the model")
        chat.send("\x03")
        chat.see("Ctrl-C again or Ctrl-D to leave")
        chat.until(lambda: chat.num_prompts() == 2, "a new prompt")
        chat.see("loading the model")
        assert chat.leave("\x03") == 0
        assert "Traceback" not in chat.text()


def test_two_ctrl_c_far_apart_do_not_leave(letters, environment):
    """After two seconds a Ctrl-C is the first one again; Ctrl-D leaves with 0."""
    with terminal(["chat", *options(letters)], environment) as chat:
        chat.see("loading the model")
        chat.send("\x03")
        chat.until(lambda: chat.num_prompts() == 2, "a new prompt")
        end = time.monotonic() + 2.2
        chat.until(lambda: time.monotonic() > end, "two seconds")
        chat.send("\x03")
        chat.until(lambda: chat.num_prompts() == 3, "one more prompt")
        assert chat.text().count("Ctrl-C again") == 2
        chat.until(lambda: chat.screen.display[chat.screen.cursor.y].strip() == PROMPT, "prompt")
        assert chat.leave("\x04") == 0
        assert chat.raw.rstrip().endswith(b"\x1b[?2004l")  # the terminal is as it was
        assert "Traceback" not in chat.text()


def test_a_question_may_be_asked_while_the_model_loads(letters, environment, home):
    """It is answered when the model is there; Ctrl-C gives the prompt back instead."""
    with terminal(["chat", *options(letters)], environment) as chat:
        chat.see("loading the model")
        chat.send("Never mind\r")
        spinner = re.compile(r"^\S loading the model", re.MULTILINE)
        chat.until(lambda: spinner.search(chat.text()), "that it waits")
        chat.send("\x03")
        chat.until(lambda: chat.num_prompts() == 2, "the prompt")
        shown = chat.enter("Hello")
        assert re.search(rf"^[a-z ]{{{MAX_NEW - 2},{MAX_NEW}}}$", shown, re.MULTILINE)
        assert chat.stat("turns") == 1
        assert chat.leave("/bye\r") == 0
    assert history_of(home)[-3:] == ["Hello", "/stats", "/bye"]


def test_a_model_that_cannot_be_loaded_ends_the_chat(environment, tmp_path):
    """The prompt goes, one line says why, and the code is 3."""
    with terminal(["chat", "-m", str(tmp_path / "none")], environment) as chat:
        chat.see("no such model file or folder")
        chat.until(lambda: not chat.child.isalive(), "the end")
        chat.child.close()
        assert chat.child.exitstatus == 3
        assert "Traceback" not in chat.text()


@pytest.fixture(scope="module")
def dumb(letters, environment):
    """A whole chat on a dumb terminal: what it wrote, and its exit code."""
    with terminal(["chat", *options(letters)], environment | {"TERM": "dumb"}) as chat:
        chat.see(PROMPT)
        chat.send("Hello\r")
        chat.see("stopped at the cap")
        chat.until(lambda: chat.num_prompts() == 2, "the prompt")
        code = chat.leave("/bye\r")
        yield SimpleNamespace(code=code, raw=chat.raw, text=chat.text())


def test_a_dumb_terminal_gets_plain_text(dumb, model):
    """TERM=dumb: prompt and answer, nothing redrawn, no colours, and the way out."""
    assert dumb.code == 0
    (expected,) = answers_to(model, ["Hello"])
    assert expected in dumb.text
    assert "tok/s" not in dumb.text
    assert b"\x1b[2K" not in dumb.raw
    assert not re.search(rb"\x1b\[[\d;]*m", dumb.raw)


def test_a_dumb_terminal_gets_no_escape_codes(dumb):
    """TERM=dumb: not one ESC."""
    assert b"\x1b" not in dumb.raw


def test_a_notice_on_a_dumb_terminal_has_its_own_row(dumb, model):
    """A notice behind an answer begins a new row."""
    (expected,) = answers_to(model, ["Hello"])
    rows = dumb.text.splitlines()
    assert expected.rstrip() in rows
    assert any(row.startswith("── stopped at the cap") for row in rows)


def test_a_plain_chat_is_words_only(letters, environment, model):
    """--plain on a terminal that can do more: nothing redrawn, no lines, no bars, no odd prompt."""
    with terminal(["chat", *options(letters, "--plain")], environment) as chat:
        chat.see(">")
        chat.send("Hello\r")
        chat.see("(stopped at the cap")
        chat.send("/cache\r")
        chat.see("tokens held: ")
        assert chat.leave("/bye\r") == 0
        (expected,) = answers_to(model, ["Hello"])
        assert expected.rstrip() in chat.text()
        assert "loading the model" in chat.text()
    # Colours may be there, and nothing else.
    assert b"\x1b" not in re.sub(rb"\x1b\[[\d;]*m", b"", chat.raw)
    assert not set(chat.text()) & set(f"█░▌─│…{PROMPT}")


def test_answers_go_to_a_file_and_the_prompt_to_the_terminal(letters, environment, tmp_path):
    """`chat > FILE` on a terminal: the file has the answers alone."""
    file = tmp_path / "answers.txt"
    command = " ".join([*PROGRAM, "chat", *options(letters)])
    with terminal(f"exec {command} > {file}", environment) as chat:
        chat.see(PROMPT, timeout=10)
        chat.send("Hello\r")
        chat.see("stopped at the cap")
        chat.see("/help")  # the next prompt is there: before, Ctrl-D would be the line editor's
        assert chat.leave("\x04") == 0
    assert re.fullmatch("[a-z ]+\n+", file.read_text())


# The answer on a screen, without the program

HOSTILE = "list[0] [red]x[/] [/INST] src/[id].tsx :smile: \x1b[2J\x1b]0;t\x07 42 é 我 end"
SHOWN = "list[0] [red]x[/] [/INST] src/[id].tsx :smile: ␛[2J␛]0;t␇ 42 é 我 end"


@pytest.fixture
def animated(monkeypatch):
    """As on a terminal that can redraw."""
    monkeypatch.setattr(answer_module, "can_animate", lambda: True)


def status(_width):
    return Text("status")


def screen_console(columns, **more):
    return Console(file=io.StringIO(), force_terminal=True, width=columns, height=24, **more)


def on_screen(console, rows=200):
    """What a terminal of the console's width makes of what was written to it."""
    screen = pyte.Screen(console.width, rows)
    screen.set_mode(pyte.modes.LNM)  # a line feed returns too, as a tty makes it
    pyte.Stream(screen).feed(console.file.getvalue())
    return [row.rstrip() for row in screen.display]


@pytest.mark.parametrize("columns", [20, 40, 80])
@pytest.mark.parametrize("cuts", [1, 3, 1000])
def test_model_text_is_shown_to_the_letter(animated, columns, cuts):
    """Brackets, emoji codes and numbers stay as they are; escape codes are shown, not obeyed.

    With rich's markup, emoji and highlighter at their defaults, which would change all of them.
    """
    console = screen_console(columns)
    view = AnswerView(console, status)
    for begin in range(0, len(HOSTILE), cuts):
        view.write(HOSTILE[begin : begin + cuts])
    view.close()
    shown = "".join(on_screen(console)).replace(" ", "")
    assert shown == SHOWN.replace(" ", "")
    if columns == 80:
        assert SHOWN[:60] in "\n".join(on_screen(console)).replace("\n", " ")
    written = console.file.getvalue()
    assert "\x1b[2J" not in written
    assert "\x07" not in written
    assert set(re.findall(r"\x1b\[[\d;]*m", written)) <= {"\x1b[0m"}  # no colours


def test_model_text_is_shown_to_the_letter_where_nothing_is_redrawn(monkeypatch):
    """The same on a plain terminal: no escape code of the model's reaches it."""
    monkeypatch.setattr(answer_module, "can_animate", lambda: False)
    console = screen_console(80)
    view = AnswerView(console, status)
    for char in HOSTILE:
        view.write(char)
    view.close()
    assert console.file.getvalue() == SHOWN + "\n"


def test_a_notice_with_brackets_is_shown_to_the_letter(animated):
    """Notices are no markup either, lose nothing, and what comes after begins a new row."""
    console = screen_console(40)
    view = AnswerView(console, status)
    view.write("before")
    view.notice("[bold]a notice that is longer than the row is wide[/]", is_last=True)
    view.write(" after")
    view.close()
    rows = [row for row in on_screen(console) if row]
    assert rows == [
        "before",
        "── [bold]a notice that is longer than",
        "the row is wide[/] " + "─" * 20,
        "after",
    ]


def test_a_notice_within_an_answer_takes_no_word_apart(animated):
    """It stands above the row that grows, which goes on."""
    console = screen_console(40)
    view = AnswerView(console, status)
    view.write("a row that is full, and another wo")
    view.notice("turn 1 left")
    view.write("rd that goes on")
    view.close()
    assert [row for row in on_screen(console) if row] == [
        "── turn 1 left " + "─" * 24,
        "a row that is full, and another word",
        "that goes on",
    ]


def test_nothing_of_the_status_line_stays(animated):
    """However often it was redrawn, the screen ends with the answer alone, in order."""
    console = screen_console(30)
    view = AnswerView(console, status)
    words = [f"word{i}" for i in range(200)]
    for index, word in enumerate(words):
        view.write(f"{word} ")
        if index % 20 == 0:
            view.refresh()
    view.close()
    rows = on_screen(console)
    assert " ".join(rows).split() == words
    assert "status" in console.file.getvalue()


def test_thinking_and_answer_stand_on_rows_of_their_own(animated):
    """Text of another style begins a new row."""
    console = screen_console(40)
    view = AnswerView(console, status)
    view.write("let me think", style="dim italic")
    view.write("Aye.")
    view.close()
    assert [row for row in on_screen(console) if row] == ["let me think", "Aye."]


@given(
    text=st.text(st.sampled_from("ab \n我😀e\u0301-\u200d"), max_size=200),
    cuts=st.lists(st.integers(1, 40), min_size=1),
    width=st.integers(1, 80),
)
def test_wrapping_loses_and_reorders_nothing(text, cuts, width):
    """At any width, cut into any deltas, the rows are the text, and fit.

    Oracle: the rows, put together with the breaks that are no line ends taken as a space or as
    nothing, are the text; and the rows of the text as one piece.
    """
    maker, rows, begin = Rows(), [], 0
    while begin < len(text):
        end = begin + cuts[begin % len(cuts)]
        rows += maker.feed(text[begin:end], width)
        begin = end
    rows += maker.end_row()
    rows = [row.plain for row in rows]
    whole = Rows()
    assert rows == [row.plain for row in [*whole.feed(text, width), *whole.end_row()]]
    for row in rows:
        assert "\n" not in row
        assert cells(row) <= width or len(row) == 1
    assert _joins_to(rows, text)


def _joins_to(rows, text):
    """Whether rows can be put together to a text.

    Each break was spaces and a line end, a space or nothing.
    """
    begins = {0}
    for row in rows:
        after = set()
        for begin in begins:
            if not text.startswith(row, begin):
                continue
            end = begin + len(row)
            after.add(end)
            if text[end : end + 1] == " ":
                after.add(end + 1)
            after.add(re.compile(" *\n|").match(text, end).end())
        begins = after
        if not begins:
            return False
    return any(not text[begin:].strip("\n ") for begin in begins)


def test_a_window_that_becomes_narrower_gets_narrower_rows():
    """After a resize, what is still to come fits the new width, and what waited is not lost."""
    maker = Rows()
    rows = maker.feed("a row that would have fitted sixty cells ", 59)
    rows += [*maker.feed("and goes on", 19), *maker.end_row()]
    shown = [row.plain for row in rows]
    assert " ".join(shown) == "a row that would have fitted sixty cells and goes on"
    assert all(len(row) < 20 for row in shown)


@given(text=st.text(min_size=1, max_size=40), width=st.integers(1, 80))
def test_wrapping_always_goes_on(text, width):
    """Each cut takes at least a character away, so that it ends on any text."""
    head, rest = wrap_once(text, width)
    assert head
    assert len(rest) < len(text)
    assert text in (head + rest, f"{head} {rest}")


# The loop around it, without a terminal


class FakeChat:
    """Yields given events; runs something when it is closed."""

    def __init__(self, events, closing=lambda: None):
        self.events = events
        self.closing = closing
        self.conversation = SimpleNamespace(stream=SimpleNamespace(position=0))
        self.is_closed = False

    def take_errors(self):
        return []

    def say(self, question):
        try:
            for event in self.events:
                yield event() if callable(event) else event
        finally:
            self.closing()
            self.is_closed = True


def repl_for(chat, console, *, show_thinking=False):
    """A `Repl` on no terminal, with the chat in place of a model."""
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import DummyInput
    from prompt_toolkit.output import DummyOutput

    from streamchat.ui.repl import Repl

    with create_app_session(input=DummyInput(), output=DummyOutput()):
        return Repl(
            lambda: chat,
            console,
            announce=lambda _chat: None,
            show_thinking=show_thinking,
            interruptible=interruptible,
        )


@pytest.fixture
def state_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(answer_module, "can_animate", lambda: False)


def press_ctrl_c():
    signal.raise_signal(signal.SIGINT)
    return TextDelta("there")


def test_an_interrupt_closes_the_answer_after_its_token(state_home):
    """SIGINT between tokens: the one under way is shown, the next is not asked for."""
    conversation = FakeChat(
        [Prefilled(3, 3), TextDelta("Hello "), press_ctrl_c, TextDelta(" and never")]
    )
    console = screen_console(80)
    repl_for(conversation, console)._turn("Hi")
    assert conversation.is_closed
    assert console.file.getvalue() == "Hello there\n\n"


def test_a_second_interrupt_while_the_answer_is_closed_does_no_harm(state_home):
    """Ctrl-C pressed twice in a row stops the answer, and not the chat."""
    conversation = FakeChat(
        [Prefilled(3, 3), press_ctrl_c, TextDelta(" and never")], closing=press_ctrl_c
    )
    try:
        repl_for(conversation, screen_console(80))._turn("Hi")
    except KeyboardInterrupt:
        pytest.fail("the program would have ended")
    assert conversation.is_closed


@pytest.mark.parametrize(("show", "shown"), [(False, "Aye.\n"), (True, "hmAye.\n")])
def test_thinking_is_shown_on_request(state_home, show, shown):
    """`--show-thinking` decides whether thoughts are on the screen."""
    conversation = FakeChat([Prefilled(3, 3), ThinkingDelta("hm"), TextDelta("Aye.")])
    console = screen_console(80, no_color=True)
    repl_for(conversation, console, show_thinking=show)._turn("Hi")
    assert re.sub(r"\x1b\[[\d;]*m|\n", "", console.file.getvalue()) == shown.strip()


def test_the_history_file_is_where_state_lives(state_home, tmp_path):
    """What is typed is kept in the user's state folder, for the user's eyes only."""
    from streamchat.ui.prompt import _history

    _history()
    (path,) = tmp_path.rglob("chat_history")
    assert path.stat().st_mode & 0o077 == 0
