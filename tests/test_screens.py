"""What the chat shows, as whole screens, compared with those in tests/screens.

The program is the real one; its model says the alphabet over and over, so that every machine shows
the same. After a change that is meant, write them anew and look at the difference:

    UPDATE_SCREENS=1 python -m pytest tests/test_screens.py
"""

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from chats import Terminal, environment_in
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="ptys of POSIX")

SCREENS = Path(__file__).parent / "screens"
UPDATE = "UPDATE_SCREENS"
ALPHABET = "abcdefghijklmnopqrstuvwxyz "
ROWS = 24
WINDOW = 300
LONG = 2000
"""More tokens than a screen has cells: what was there before an answer has been scrolled away."""

STATES = [
    "idle",
    "answered",
    "cache",
    "help",
    "evicting",
    "generating",
    "resized",
    "interrupted",
]


@pytest.fixture(scope="module")
def alphabet(tiny_folder, tmp_path_factory):
    """A model that says the next letter, whatever was before it; then a space, and `a`.

    Its attention and its MLP add nothing, so that a token's logits depend on it alone.
    """
    folder = tmp_path_factory.mktemp("alphabet") / "alphabet"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_folder)
    model = LlamaForCausalLM.from_pretrained(tiny_folder)
    ids = tokenizer.convert_tokens_to_ids([*ALPHABET.strip(), "\u0120"])
    directions = torch.eye(model.config.hidden_size)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1)
        model.model.embed_tokens.weight[:] = directions[len(ids)]
        model.model.embed_tokens.weight[ids] = directions[: len(ids)]
        model.lm_head.weight.zero_()
        model.lm_head.weight[[*ids[1:], ids[0]]] = directions[: len(ids)]
        model.lm_head.weight[ids[0]] += directions[len(ids)]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def masked(terminal):
    """The screen without what differs from run to run: how far an answer is, and how fast."""
    rows = [row.rstrip() for row in terminal.screen.display]
    rows = [re.sub(r"evicted \d*,?\d{3,}\b.*", "evicted N ...", row) for row in rows]
    rows = [re.sub(r"(left +)\d*,?\d{3,}", r"\1N", row) for row in rows]
    shown = []
    for row in rows:
        if row and row.rstrip("▌") in ALPHABET * 10:
            row = "<answer>"
            if shown and shown[-1] == row:
                continue
        shown.append(row)
    return "\n".join(shown).rstrip("\n") + "\n"


def evicted(terminal):
    """What the status line says."""
    found = re.findall(r"evicted ([\d,]+)", "\n".join(terminal.screen.display))
    return int(found[-1].replace(",", "")) if found else 0


def interrupt(terminal, prompts):
    terminal.send("\x03")
    terminal.until(lambda: terminal.num_prompts() > prompts and terminal.is_idle(), "the prompt")


@pytest.fixture(scope="module", params=[80, 40])
def screens(request, alphabet, tmp_path_factory):
    """The screens of one chat, by state."""
    home = tmp_path_factory.mktemp("home")
    columns, narrow = request.param, request.param * 5 // 8
    args = ["chat", "-m", str(alphabet), "--device", "cpu", "--session", "screens"]
    args += ["--temperature", "0", "--max-new", "60", "--window", str(WINDOW)]
    terminal = Terminal(args, environment_in(home), columns=columns, rows=ROWS)
    found = {}
    try:
        terminal.until(terminal.is_idle, "an idle prompt")
        found["idle"] = masked(terminal)
        terminal.enter("Hello")
        found["answered"] = masked(terminal)
        terminal.enter("/cache")
        found["cache"] = masked(terminal)
        terminal.enter("/help")
        found["help"] = masked(terminal)
        terminal.enter("/set max_new 400")
        terminal.enter("Go on")
        found["evicting"] = masked(terminal)
        terminal.enter("/set max_new 1000000")
        prompts = terminal.num_prompts()
        terminal.send("Everything\r")
        terminal.until(lambda: evicted(terminal) > LONG, "a full screen")
        found["generating"] = masked(terminal)
        terminal.resize(narrow)
        begin = evicted(terminal)
        terminal.until(lambda: evicted(terminal) > begin + LONG, "a full narrow screen")
        found["resized"] = masked(terminal)
        terminal.resize(columns)
        begin = evicted(terminal)
        terminal.until(lambda: evicted(terminal) > begin + LONG, "a full screen again")
        interrupt(terminal, prompts)
        found["interrupted"] = masked(terminal)
        assert terminal.leave() == 0
    finally:
        terminal.end()
    return columns, found


@pytest.mark.parametrize("state", STATES)
def test_the_screen_is_the_one_that_was_stored(screens, state):
    """Row by row, for 80 and for 40 columns."""
    columns, found = screens
    file = SCREENS / f"{state}-{columns}.txt"
    if os.environ.get(UPDATE):
        file.parent.mkdir(exist_ok=True)
        file.write_text(found[state], encoding="utf-8")
    assert found[state].splitlines() == file.read_text(encoding="utf-8").splitlines()


def test_no_row_is_wider_than_the_terminal_and_the_status_is_there_once(screens):
    """In no state is anything wrapped by the terminal itself, or left behind by a redrawing."""
    columns, found = screens
    for state, screen in found.items():
        assert screen.count("│ evicted") == 1, state
        assert all(len(row) < columns for row in screen.splitlines()), state


@pytest.mark.slow
@pytest.mark.parametrize("columns", [0, 1, 2, 5, 200])
def test_at_odd_widths_the_answer_is_there(alphabet, tmp_path, columns):
    """Also where a terminal says it has no columns: it is asked, answers, and ends with 0."""
    args = ["chat", "-m", str(alphabet), "--device", "cpu", "--no-log"]
    args += ["--temperature", "0", "--max-new", "60"]
    terminal = Terminal(args, environment_in(tmp_path), columns=columns or 80, rows=40)
    terminal.child.setwinsize(40, columns)
    try:
        terminal.until(lambda: b"\x1b[?2004h" in terminal.raw, "a prompt")
        begin = len(terminal.raw)
        terminal.send("Hello\r")
        terminal.until(
            lambda: "(/setmax_newN)" in "".join(terminal.text().split()), "the end of the answer"
        )
        assert ALPHABET.strip() * 2 in "".join(terminal.text().split())
        terminal.until(lambda: b"\x1b[?2004h" in terminal.raw[begin:], "the next prompt")
        assert terminal.leave() == 0
        assert "Traceback" not in terminal.text()
    finally:
        terminal.end()


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{"TERM": "screen-256color"}, {"FORCE_COLOR": "1", "NO_COLOR": "1"}]
)
def test_on_other_terminals_nothing_is_coloured_that_should_not_be(alphabet, tmp_path, more):
    """In tmux as elsewhere; NO_COLOR wins over FORCE_COLOR, and leaves bold and dim."""
    args = ["chat", "-m", str(alphabet), "--device", "cpu", "--no-log", "--max-new", "60"]
    terminal = Terminal([*args, "--temperature", "0"], environment_in(tmp_path) | more)
    try:
        terminal.until(terminal.is_idle, "an idle prompt")
        assert ALPHABET.strip() * 2 in "".join(terminal.enter("Hello").split())
        terminal.enter("/cache")
        colors = re.findall(rb"\x1b\[(?:[\d;]*;)?(?:3[0-7]|38;[\d;]+)m", terminal.raw)
        assert bool(colors) == ("NO_COLOR" not in more)
        assert terminal.leave() == 0
    finally:
        terminal.end()
