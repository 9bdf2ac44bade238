"""`streamchat sessions`: list, show, search, export, rm; and a session's options on `chat`."""

import json
import os
import subprocess
import sys
from datetime import datetime

import pytest

from streamchat.chat import recalled
from streamchat.store.folder import Sessions
from streamchat.store.log import Log, Passage
from streamchat.store.recall import Recalled

NOON = 1_760_000_000.0


@pytest.fixture
def sessions(data_folder):
    return Sessions(data_folder)


@pytest.fixture
def tea(sessions):
    """A session with two turns, the second one with something recalled."""
    with sessions.open("tea") as session, Log(session.log_path) as log:
        add(log, 1, "The ship is the Pequod.\nShe sails.", "Aye.")
        add(log, 2, "Which ship?", "The Pequod <|im_end|>.", told=[(1, 0, 23)])
        log.set_settings({"model": "tiny"})
    os.utime(sessions.find("tea") / "log.sqlite", (NOON, NOON))
    return sessions


def add(log, turn, question, answer, told=()):
    start = log.next_position()
    passages = [
        Passage(
            role="user",
            text=question,
            created=NOON,
            turn=turn,
            first_position=start,
            last_position=start + 9,
        )
    ]
    if told:
        pieces = [Recalled(log.get([i])[0], log.get([i])[0].text[a:b], 1.0) for i, a, b in told]
        text = recalled.references(pieces)
        passages.append(Passage(role=recalled.ROLE, text=text, created=NOON, turn=turn))
    passages.append(
        Passage(
            role="assistant",
            text=answer,
            created=NOON,
            turn=turn,
            first_position=start + 10,
            last_position=start + 19,
        )
    )
    log.append(passages)


def stamp():
    return f"{datetime.fromtimestamp(NOON):%Y-%m-%d %H:%M}"


def test_list_shows_the_last_used_first(tea, command):
    """Name, when, turns, size, first words; one line each; damaged ones are named so."""
    with tea.open("old") as session, Log(session.log_path) as log:
        add(log, 1, "A question that is far too long for a list of sessions, is it not?", "Yes.")
    os.utime(tea.find("old") / "log.sqlite", (NOON - 60, NOON - 60))
    with tea.open("bad") as session:
        session.log_path.write_bytes(b"nonsense" * 100)
    os.utime(tea.find("bad") / "log.sqlite", (NOON - 90, NOON - 90))
    done = command("sessions", "list")
    assert (done.code, done.err) == (0, "")
    first, second, third = done.out.splitlines()
    assert first.split()[:5] == ["tea", *stamp().split(), "2", "turns"]
    assert first.endswith("The ship is the Pequod. She sails.")
    assert second.split()[:1] == ["old"]
    assert "1 turn " in second
    assert second.endswith("A question that is far too long for a l…")
    assert third.split()[:1] == ["bad"]
    assert "damaged" in third
    # Looking at a session is no use of it.
    again = command("sessions", "list", "--json")
    records = [json.loads(line) for line in again.out.splitlines()]
    assert [(r["name"], r["turns"]) for r in records] == [("tea", 2), ("old", 1), ("bad", None)]
    assert records[0]["used"] == NOON


def test_an_empty_list_says_so(sessions, command):
    """On standard error, and nothing is made."""
    done = command("sessions", "list")
    assert (done.code, done.out) == (0, "")
    assert "there is no session in " in done.err
    assert not sessions.folder.exists()


def test_without_a_command_there_is_help(command):
    """As for the program itself."""
    done = command("sessions")
    assert done.code == 0
    for name in ("list", "show", "search", "export", "rm"):
        assert f" {name} " in done.out


def test_show_has_all_that_was_said_and_told(tea, command):
    """What was recalled stands there in the words that the model was given."""
    done = command("sessions", "show", "tea")
    assert (done.code, done.err) == (0, "")
    assert done.out == (
        f"[turn 1, {stamp()}, user]\nThe ship is the Pequod.\nShe sails.\n\n"
        f"[turn 1, {stamp()}, assistant]\nAye.\n\n"
        f"[turn 2, {stamp()}, user]\nWhich ship?\n\n"
        "[Recalled from earlier:]\n"
        f"[turn 1, {stamp()}, user] The ship is the Pequod.\n"
        "[End of what was recalled.]\n\n"
        f"[turn 2, {stamp()}, assistant]\nThe Pequod <|im_end|>.\n\n"
    )


def test_search_finds_words_in_all_sessions_or_one(tea, command):
    """With session, turn and time; the index of what was recalled is none of it."""
    with tea.open("other") as session, Log(session.log_path) as log:
        add(log, 7, "A ship in a bottle", "Nice.")
    done = command("sessions", "search", "ship")
    assert done.code == 0
    rows = done.out.splitlines()
    assert rows[0] == f"other: [turn 7, {stamp()}, user] A ship in a bottle"
    assert len([row for row in rows if row.startswith("tea: ")]) == 2
    one = command("sessions", "search", "the", "ship", "--session", "tea", "--limit", "1", "--json")
    (record,) = [json.loads(line) for line in one.out.splitlines()]
    assert (record["session"], record["role"]) == ("tea", "user")
    none = command("sessions", "search", "23")
    assert (none.code, none.out) == (0, "")
    assert "nothing matches" in none.err


def test_export_is_whole(tea, command):
    """Markdown for people; JSON lines have every field that is known, and what was recalled."""
    done = command("sessions", "export", "tea")
    assert done.out.startswith(f"# tea\n\n## turn 1, {stamp()}, user\n\nThe ship is the Pequod.\n")
    assert "The model was told again:\n\n> [Recalled from earlier:]\n" in done.out
    lines = command("sessions", "export", "tea", "--format", "jsonl").out.splitlines()
    records = [json.loads(line) for line in lines]
    with Log(tea.find("tea") / "log.sqlite", read_only=True) as log:
        said = list(log.passages())
    assert [record["id"] for record in records] == [passage.id for passage in said]
    assert [r["text"] for r in records if r["role"] != recalled.ROLE] == [
        p.text for p in said if p.role != recalled.ROLE
    ]
    (told,) = [record for record in records if record["role"] == recalled.ROLE]
    assert told["pieces"] == [1]
    assert "The ship is the Pequod." in told["text"]
    assert records[0]["first_position"] == 0
    assert "speaker" not in records[0]


def test_rm_deletes_wholly_and_all_or_none(tea, command):
    """A name that is wrong deletes none; then nothing of the session is left."""
    wrong = command("sessions", "rm", "tea", "missing")
    assert wrong.code == 2
    assert "there is no session 'missing'" in wrong.err
    assert tea.names() == ["tea"]
    (tea.find("tea") / "state.safetensors.damaged-1").write_bytes(b"x")
    done = command("sessions", "rm", "tea")
    assert (done.code, done.out) == (0, "")
    assert [p.name for p in tea.folder.rglob("*") if p.is_file()] == [".lock"]


@pytest.mark.parametrize("name", ["show", "export", "rm"])
def test_a_session_that_is_not_there(sessions, command, name):
    """One line and exit code 2; nothing is made."""
    done = command("sessions", name, "tea")
    assert (done.code, done.out) == (2, "")
    assert done.err == "streamchat: there is no session 'tea'; see streamchat sessions list\n"
    assert not sessions.folder.exists()


def test_a_damaged_log_is_one_line(tea, command):
    """Refused with the reason; a search goes on with the others."""
    with tea.open("bad") as session:
        session.log_path.write_bytes(b"nonsense" * 100)
    for name in ("show", "export"):
        done = command("sessions", name, "bad")
        assert (done.code, done.out) == (1, "")
        assert "is damaged: file is not a database" in done.err
    assert command("sessions", "search", "ship", "--session", "bad").code == 1
    done = command("sessions", "search", "ship")
    assert done.code == 0
    assert "is damaged" in done.err
    assert "tea: " in done.out


def test_another_process_may_look_while_it_is_open(tea, command):
    """List and show; deleting is refused."""
    with tea.open("tea") as session, Log(session.log_path) as log:
        add(log, 3, "Still here?", "Yes.")
        assert "3 turns" in command("sessions", "list").out
        assert "Still here?" in command("sessions", "show", "tea").out
        done = command("sessions", "rm", "tea")
    assert done.code == 1
    assert "session tea is in use by another process" in done.err


def test_it_needs_no_torch(tea):
    """Listing a few sessions takes no seconds of imports."""
    code = (
        "import sys; from streamchat.cli.app import run;"
        "codes = [run(['sessions', *args]) for args in"
        " (['list'], ['show', 'tea'], ['search', 'ship'], ['export', 'tea'], ['rm', 'tea'])];"
        "sys.exit(int(any(codes) or 'torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


# Options of chat


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--no-log", "--session", "tea"], "--no-log keeps nothing"),
        (["--no-log", "-c"], "--no-log keeps nothing"),
        (["--session", "tea", "-c"], "choose --session NAME or --continue"),
        (["-c"], "there is no session to go on with"),
        (["--session", "../tea"], "a session's name is made of letters"),
        (["--session", "tea", "--temperature", "-1"], "temperature must be at least 0"),
        (["--session", "tea", "--window", "no"], "--window must be auto or a number"),
    ],
)
def test_options_that_cannot_be(sessions, command, tiny_folder, args, message):
    """One line, exit code 2, and no session is begun."""
    done = command("chat", "-m", tiny_folder, *args, stdin=b"Hello\n")
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert sessions.names() == []


CHAT = ["--max-new", "4", "--no-self-check", "--temperature", "0"]


def test_a_session_remembers_its_options(sessions, command, tiny_folder):
    """Model, sizes, sampling, system prompt are those of the session, and a flag wins."""
    args = ["-m", tiny_folder, "--session", "tea", "-s", "Be brief.", "--window", "90", *CHAT]
    assert command("chat", *args, stdin=b"Hello\n").code == 0
    again = command("chat", "-c", "--no-self-check", stdin=b"More\n")
    assert again.code == 0
    assert "tiny-llama on cpu, 25 pinned + 90 newest; session tea (1 turn)" in again.err
    assert "rebuilt" not in again.err
    other = command("chat", "-c", "--no-self-check", "--window", "120", stdin=b"More\n")
    assert "25 pinned + 120 newest; session tea (2 turns)" in other.err
    assert "window_size was 90, is 120" in other.err
    assert "the model's memory was rebuilt" in other.err
    with Log(sessions.find("tea") / "log.sqlite", read_only=True) as log:
        settings = log.settings()
        assert log.num_passages("user") == 3
    assert settings["window"] == "120"
    assert (settings["temperature"], settings["max_new"]) == (0.0, 4)
    assert settings["model"] == str(tiny_folder.resolve())


def test_settings_that_are_none_are_refused(sessions, command, tiny_folder):
    """A log that says nonsense of an option ends in one line, not in a traceback."""
    for name, value in (("temperature", "hot"), ("top_k", True), ("stop", [1]), ("model", 7)):
        with sessions.open("tea") as session, Log(session.log_path) as log:
            log.set_settings({name: value})
        done = command("chat", "--session", "tea", stdin=b"Hello\n")
        assert (done.code, done.out) == (1, "")
        assert f"is damaged: its setting {name} is {value!r}" in done.err


def test_continue_leaves_out_what_nothing_was_said_in(sessions, command, tiny_folder):
    """A session that a crash left empty, though it is the newest."""
    args = ["-m", tiny_folder, "--session", "tea", *CHAT]
    assert command("chat", *args, stdin=b"Hello\n").code == 0
    os.utime(sessions.find("tea") / "log.sqlite", (NOON, NOON))
    os.utime(sessions.find("tea") / "state.safetensors", (NOON, NOON))
    with sessions.open("empty") as session:
        Log(session.log_path).close()
    done = command("chat", "-c", "--no-self-check", stdin=b"")
    assert "session tea (1 turn)" in done.err


def test_recall_on_pipes_is_shown_where_it_is_no_data(sessions, command, tiny_folder):
    """What the model was told again is on standard error and in `sessions show`, in its words."""
    talk = ["the ship is called Pequod", *(f"talk{index}" for index in range(20)), "which ship?"]
    args = ["--session", "tea", "--recall", "--window", "500", "-m", tiny_folder, *CHAT]
    done = command("chat", *args, stdin="\n".join(talk).encode())
    assert done.code == 0
    (told,) = [row for row in done.err.splitlines() if "Recalled" in row]
    passage = f"[turn 1, {datetime.now():%Y-%m-%d} "
    assert passage in told
    assert "user] the ship is called Pequod" in told
    assert "Recalled" not in done.out
    shown = command("sessions", "show", "tea").out
    assert shown.index("which ship?") < shown.index("Recalled") < shown.rindex("Pequod")


def test_what_only_a_log_could_recall_needs_one(sessions, command, tiny_folder):
    """--recall with --no-log: one line, before anything is answered."""
    args = ["--recall", "--no-log", "-m", tiny_folder, *CHAT]
    done = command("chat", *args, stdin=b"Hello\n")
    assert (done.code, done.out) == (2, "")
    assert "not logged (--no-log)" in done.err


def test_a_chat_about_what_was_listened_to(sessions, command, tiny_folder):
    """`pipe --mode listen`, then `chat`: gone on with exactly, and the header says what it is."""
    lines = "".join(f"line {number} of the talk\n" for number in range(40))
    place = ["--session", "talk", "-m", tiny_folder, "--window", "300", "--no-self-check"]
    assert command("pipe", "--mode", "listen", *place, stdin=lines.encode()).code == 0
    done = command("chat", *place, *CHAT, stdin=b"What was it about?\n")
    assert done.code == 0
    assert "session talk (40 passages heard)" in done.err
    assert "rebuilt" not in done.err
    assert "fed from the log" not in done.err
    with Log(sessions.find("talk") / "log.sqlite", read_only=True) as log:
        said = list(log.passages())
    assert [passage.role for passage in said[-3:]] == ["input", "user", "assistant"]
    assert said[-2].first_position == said[-3].last_position + 1


def test_sessions_of_pipe_without_a_log_are_no_damage(tea, command, tiny_folder, tmp_path):
    """They say how far pipe is, and keep no text: listed as such, passed over by a search."""
    args = ["pipe", "--mode", "score", "-m", tiny_folder, "--session", "scores"]
    assert command(*args, stdin=b"one\ntwo\n").code == 0
    with tea.open("empty"):
        pass
    done = command("sessions", "list")
    assert done.code == 0
    kinds = {line.split()[0]: line for line in done.out.splitlines()}
    assert " pipe " in kinds["scores"]
    assert " never " in kinds["empty"]
    assert " empty " in kinds["empty"].removeprefix("empty")
    assert " 2 turns " in kinds["tea"]
    assert "damaged" not in done.out
    found = command("sessions", "search", "Pequod")
    assert (found.code, found.err) == (0, "")
    assert all(line.startswith("tea: ") for line in found.out.splitlines())
    for name in ("show", "export"):
        done = command("sessions", name, "scores")
        assert done.code == 2
        assert "session scores keeps no text" in done.err
        assert len(done.err.splitlines()) == 1
