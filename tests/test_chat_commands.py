"""Slash commands, what Tab completes, and the picture of the memory, without a terminal."""

import base64
import io
import re
import stat
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from rich.cells import cell_len
from rich.console import Console

from streamchat import CacheConfig
from streamchat.chat.conversation import Conversation
from streamchat.chat.session import ChatSession
from streamchat.errors import StreamchatError, UsageError
from streamchat.store.folder import FOLDER_VARIABLE
from streamchat.ui import clipboard, memory
from streamchat.ui.commands import COMMANDS, HELP, KEYS, TAKES_PATH, WORDS, Commands, Outcome
from streamchat.ui.completion import SlashCompleter
from streamchat.ui.console import set_plain
from streamchat.ui.memory import Part, bar, parts, shortened

posix_only = pytest.mark.skipif(sys.platform == "win32", reason="the editor is a shell script")


class FakeTerminal(io.StringIO):
    """A buffer that says it is a terminal."""

    def isatty(self):
        return True


class Screen:
    """Commands on a console of so many columns, and a chat that keeps nothing."""

    def __init__(self, loaded, columns=80, *, window=200, policy="sink"):
        self.console = Console(file=FakeTerminal(), width=columns, color_system=None)
        self.commands = Commands(self.console)
        cache = CacheConfig(window_size=window, policy=policy)
        conversation = Conversation(loaded, cache=cache, max_new_tokens=20)
        self.chat = ChatSession(conversation)

    def ask(self, question):
        for _ in self.chat.say(question):
            pass

    def run(self, text):
        """Runs a command; gives what it wrote."""
        self.outcome = self.commands.run(text, self.chat)
        written = self.console.file.getvalue()
        self.console.file.seek(0)
        self.console.file.truncate()
        return written


@pytest.fixture
def screen(loaded):
    return Screen(loaded)


@pytest.fixture
def plain():
    set_plain(True)
    yield
    set_plain(False)


# /help


@pytest.mark.parametrize("columns", [10, 20, 40, 80, 200])
def test_help_says_everything_at_any_width(loaded, columns):
    """No row is wider than the terminal, and no word is missing."""
    shown = Screen(loaded, columns).run("/help")
    words = shown.split()
    for name, meaning in [*HELP.items(), *KEYS.items()]:
        assert name.split()[0] in "".join(words)
        assert "".join(meaning.split()) in "".join(shown.split()) or columns >= 40
    if columns >= 40:
        assert all(len(row) < columns for row in shown.splitlines())
        starts = [row for row in shown.splitlines() if row.startswith("/")]
        assert [row.split()[0] for row in starts] == [name.split()[0] for name in HELP]


def test_every_command_that_help_lists_is_there(screen, monkeypatch):
    """A name without its words is a usage error, or something is done: never unknown."""
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.delenv("EDITOR", raising=False)
    for name in HELP:
        problem = ""
        try:
            screen.run(name.split()[0])
        except StreamchatError as error:
            problem = str(error)
        assert "unknown command" not in problem
    with pytest.raises(UsageError, match=r"unknown command '/x', type /\? for help"):
        screen.run("/x")


# /read


def test_what_was_read_stands_in_front_of_the_next_turn(screen, tmp_path):
    """Once, in the order of reading; the file's name may have spaces; it is told how long it is."""
    file = tmp_path / "my notes.txt"
    file.write_bytes("\ufeffäh\r\ntwo\n\n".encode())
    other = tmp_path / "other"
    other.write_text("three", encoding="utf-8")
    assert screen.run(f"/read {file}") == "my notes.txt: 7 tokens, for your next turn\n"
    assert screen.outcome == Outcome()
    screen.run(f"/read  {other} ")
    assert screen.commands.turn_of("why?") == "äh\ntwo\n\nthree\n\nwhy?"
    assert screen.commands.turn_of("and?") == "and?"


def test_bytes_that_are_no_utf8_are_replaced(screen, tmp_path):
    """Each as U+FFFD, and the rest stays."""
    file = tmp_path / "bytes"
    file.write_bytes(b"a\xffb\x00c")
    screen.run(f"/read {file}")
    assert screen.commands.turn_of("?") == "a\ufffdb\x00c\n\n?"


def test_a_text_that_is_longer_than_the_memory_is_told(screen, tmp_path):
    """It is taken all the same: its end will be there."""
    file = tmp_path / "long"
    file.write_text("x" * 500, encoding="utf-8")
    shown = screen.run(f"/read {file}")
    assert "500 tokens" in shown
    assert "the newest 200 only" in shown
    assert screen.commands.turn_of("?").startswith("x" * 500)


def test_clear_forgets_what_was_read(screen, tmp_path):
    """The next turn after /clear is the question alone."""
    file = tmp_path / "text"
    file.write_text("x", encoding="utf-8")
    screen.run(f"/read {file}")
    screen.run("/clear")
    assert screen.commands.turn_of("?") == "?"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "usage: /read FILE"),
        ("none.txt", "No such file"),
        (".", "is no file"),
        ("empty", "is empty"),
        ("large", "too large"),
    ],
)
def test_a_bad_file_is_one_line(screen, tmp_path, monkeypatch, name, problem):
    """And nothing is read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_bytes(b"\n \n")
    (tmp_path / "large").write_bytes(b"x" * 1_000_001)
    with pytest.raises(UsageError, match=problem) as caught:
        screen.run(f"/read {name}")
    assert "\n" not in str(caught.value)
    assert screen.commands.turn_of("?") == "?"


# /edit


@pytest.fixture
def editor(tmp_path, monkeypatch):
    """Sets $EDITOR to a script; `$1` in it is the file."""
    monkeypatch.delenv("VISUAL", raising=False)

    def use(script):
        file = tmp_path / "my editor"
        file.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("EDITOR", f"'{file}'")

    return use


@pytest.fixture
def on_file(screen, tmp_path):
    """A screen whose terminal is a file: an editor writes to it."""
    with (tmp_path / "terminal").open("w+", encoding="utf-8") as file:
        screen.console.file = file
        screen.console.width = 500
        screen.run = lambda text: screen.commands.run(text, screen.chat)
        yield screen


@posix_only
def test_what_is_saved_in_the_editor_is_asked(on_file, editor):
    """The draft is there to be changed; several lines stay several lines."""
    editor('printf "more\\nlines\\n" >> "$1"')
    assert on_file.run("/edit a draft") == Outcome(ask="a draft\nmore\nlines", is_new=True)


@posix_only
def test_without_a_draft_the_last_question_is_edited(on_file, editor):
    """Its own words come to the editor."""
    on_file.ask("Hello there")
    editor('sed -i s/there/again/ "$1"')
    assert on_file.run("/edit") == Outcome(ask="Hello again", is_new=True)


@posix_only
@pytest.mark.parametrize("script", ["true", ': > "$1"'], ids=["unchanged", "emptied"])
def test_nothing_new_is_not_asked(on_file, editor, script):
    """A draft stands behind the prompt again."""
    editor(script)
    assert on_file.run("/edit a draft") == Outcome(draft="a draft")


@posix_only
def test_an_editor_that_fails_is_one_line_and_the_draft_is_not_lost(on_file, editor, monkeypatch):
    """With its exit code; without an editor, how to set one."""
    editor("exit 3")
    assert on_file.run("/edit a draft") == Outcome(draft="a draft")
    monkeypatch.setenv("EDITOR", "/no/such/editor -w")
    assert on_file.run("/edit a draft").draft == "a draft"
    monkeypatch.delenv("EDITOR")
    assert on_file.run("/edit a draft").draft == "a draft"
    on_file.console.file.seek(0)
    first, second, third = on_file.console.file.read().splitlines()
    assert first.endswith("my editor ended with 3")
    assert second == "cannot start the editor /no/such/editor: No such file or directory"
    assert third == "no editor: set VISUAL or EDITOR"


# /copy


def copied(written):
    """What OSC 52 would put on the clipboard."""
    (code,) = re.findall("\x1b\\]52;c;([A-Za-z0-9+/=]*)\x07", written)
    return base64.b64decode(code).decode()


def test_the_last_answer_is_copied_to_the_letter(screen, monkeypatch):
    """As the model wrote it, line ends and marks included."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("TMUX", raising=False)
    screen.ask("Hello")
    screen.chat.conversation.turns[-1].answer = "**a** 我\nb"
    shown = screen.run("/copy")
    assert copied(shown) == "**a** 我\nb"
    assert "the answer to turn 1: sent to the terminal's clipboard" in shown


def test_without_an_answer_or_a_clipboard_that_is_said(screen, monkeypatch):
    """No escape code comes on a terminal that would show it."""
    with pytest.raises(UsageError, match="no answer yet"):
        screen.run("/copy")
    screen.ask("Hello")
    monkeypatch.delenv("TMUX", raising=False)
    for term in ("dumb", "linux"):
        monkeypatch.setenv("TERM", term)
        with pytest.raises(UsageError, match="no clipboard"):
            screen.run("/copy")
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(UsageError, match="no clipboard"):
        clipboard.copy("x", io.StringIO())


@posix_only
def test_in_tmux_its_own_buffer_is_used(tmp_path, monkeypatch):
    """By tmux's command; where that fails, by the escape code."""
    tmux = tmp_path / "tmux"
    tmux.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/args\ncat > {tmp_path}/text\n')
    tmux.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("TMUX", "/tmp/tmux-0/default,1,0")
    monkeypatch.setenv("TERM", "screen-256color")
    terminal = FakeTerminal()
    assert "tmux" in clipboard.copy("naïve", terminal)
    assert (tmp_path / "text").read_text(encoding="utf-8") == "naïve"
    assert (tmp_path / "args").read_text().split() == ["load-buffer", "-w", "-"]
    assert terminal.getvalue() == ""
    tmux.write_text("#!/bin/sh\nexit 1\n")
    clipboard.copy("naïve", terminal)
    assert copied(terminal.getvalue()) == "naïve"


# Completion


def completions(text):
    completer = SlashCompleter(COMMANDS, WORDS, TAKES_PATH)
    document = Document(text, len(text))
    return [found.text for found in completer.get_completions(document, CompleteEvent())]


def test_commands_and_settings_are_completed():
    """A name from its beginning, then what may come after it; a question is left alone."""
    assert "he" not in completions("he")
    assert completions("/re") == ["/read", "/regen", "/recall"]
    assert completions("/set te") == ["temperature"]
    assert set(completions("/set ")) >= {"max_new", "top_p", "seed"}
    for nothing in ("", "a /re", "/set temperature ", "/evicted ", "/stats ", "/re\n", "/none x"):
        assert completions(nothing) == []


def test_sessions_are_completed(tmp_path, monkeypatch):
    """Those that are there, none where there are none."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert completions("/load ") == []
    for name in ("tea", "talk", "other"):
        (tmp_path / "sessions" / name).mkdir(parents=True)
    assert completions("/load t") == ["talk", "tea"]


def test_files_are_completed(tmp_path, monkeypatch):
    """By path, in folders, too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "monday.txt").touch()
    assert completions("/read no") == ["tes"]
    assert completions("/read notes/mo") == ["nday.txt"]


# /cache


def fed(screen, *questions):
    for question in questions:
        screen.ask(question)
    return screen.chat.conversation


@pytest.mark.parametrize("policy", ["sink", "window", "recompute", "dense", "h2o", "snapkv"])
@pytest.mark.parametrize("num_turns", [0, 1, 3])
def test_the_parts_add_up_to_the_memory(loaded, policy, num_turns):
    """Pinned, turns, others and free are the cache's size; what left is the stream's own count.

    Oracle: `Stream.stats`.
    """
    screen = Screen(loaded, window=150 if policy == "dense" else 60, policy=policy)
    conversation = fed(screen, *(f"question {n}" for n in range(num_turns)))
    stats, found = conversation.stream.stats(), parts(conversation)
    assert sum(part.num_tokens for part in found[:-1]) == stats.cache_size
    assert all(part.num_tokens >= 0 for part in found)
    by_name = {part.name: part.num_tokens for part in found}
    assert by_name["free"] == stats.cache_size - stats.num_held
    assert by_name["left"] == stats.num_evicted
    assert by_name.get("pinned", 0) == stats.num_pinned


def test_each_turn_has_as_many_tokens_as_are_held(loaded):
    """The oldest one in part: a token more of it leaves with each one that is fed.

    Oracle: the positions of turns in the stream, counted one by one.
    """
    screen = Screen(loaded, window=150)
    conversation = fed(screen, *(f"question {n}" for n in range(6)))
    sinks, position = conversation.cache_config.sink_size, conversation.stream.position
    held = [n for n in range(position) if n >= position - 150 and n >= sinks]
    expected = {}
    for turn in conversation.turns:
        number = sum(turn.start <= n < turn.end for n in held)
        whole = turn.end - turn.start
        if number:
            expected[f"turn {turn.number}{'' if number == whole else ' (part)'}"] = number
    found = {p.name: p.num_tokens for p in parts(conversation) if p.name.startswith("turn")}
    assert found == expected
    assert sum(name.endswith("(part)") for name in found) == 1


@pytest.mark.parametrize("columns", [24, 40, 80, 200])
def test_the_picture_fits_and_names_the_turns(loaded, columns):
    """A bar of the terminal's width at most, then a line for each part, none of them wrapped."""
    screen = Screen(loaded, columns, window=150)
    fed(screen, *(f"question {n} [red]我[/] and many words behind it" for n in range(6)))
    rows = screen.run("/cache").splitlines()
    first = next(index for index, row in enumerate(rows) if row.startswith("█"))
    assert set(rows[first]) <= set("█▓▒░")
    assert cell_len(rows[first]) == min(columns - 1, 78)
    listed = parts(screen.chat.conversation)
    assert len(rows) == first + 1 + len(listed)
    for row, part in zip(rows[first + 1 :], listed, strict=True):
        assert cell_len(row) <= columns
        assert part.name in row
        assert f"{part.num_tokens:,}" in row
    if columns >= 80:
        assert "question 5 [red]我[/]" in rows[-3]
    if columns >= 40:
        assert "turns 1 to " in rows[-1]


def test_in_plain_words_there_is_no_picture(loaded, plain):
    """The same parts, a line each, without signs."""
    screen = Screen(loaded, window=150)
    fed(screen, "one", "two")
    shown = screen.run("/cache")
    assert not set(shown) & set("█▓▒░│─…")
    for part in parts(screen.chat.conversation):
        assert f"{part.name}: {part.num_tokens:,} tokens" in shown


@given(
    tokens=st.lists(st.integers(0, 5000), min_size=1, max_size=30).filter(any),
    width=st.integers(1, 120),
)
def test_a_bar_is_as_wide_as_it_should_be(tokens, width):
    """Each part has its share of the width, to the cell."""
    found = [Part(str(n), count, "ab"[n % 2], "window") for n, count in enumerate(tokens)]
    drawn = bar(found, width).plain
    assert len(drawn) == width
    for sign in "ab":
        share = sum(p.num_tokens for p in found if p.sign == sign) / sum(tokens)
        assert abs(drawn.count(sign) - share * width) <= len(found)


def test_the_pinned_part_is_never_missing():
    """However few of a large memory are pinned."""
    found = [Part("pinned", 4, "█", "pinned"), Part("free", 100_000, "░", "free")]
    assert bar(found, 20).plain == "█" + "░" * 19


def test_many_turns_are_shortened():
    """The oldest and the newest have lines, those between them one; no token is lost."""
    turns = [Part(f"turn {n}", n, "▓", "window") for n in range(1, 31)]
    found = [Part("pinned", 4, "█", "pinned"), *turns, Part("free", 9, "░", "free")]
    names = [part.name for part in shortened(found)]
    newest = [f"turn {n}" for n in range(31 - memory.MAX_LISTED + 2, 31)]
    assert names == ["pinned", "turn 1", "23 turns", *newest, "free"]
    assert sum(p.num_tokens for p in shortened(found)) == sum(p.num_tokens for p in found)
    assert shortened(found[:9]) == found[:9]
