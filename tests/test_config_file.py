"""The settings file: what wins, what is refused and how, what is shown, how it is edited.

What wins is asked of the program: `config show` parses a call as the call itself would be, and one
test looks at what a command does. The oracle of the precedence is its one sentence: flag, variable,
file (a command's table before the top), default.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import streamchat
from streamchat.cli import config_file
from streamchat.cli.app import table
from streamchat.cli.config import template
from streamchat.cli.config_file import load
from streamchat.errors import UsageError
from streamchat.ui import theme
from streamchat.ui.console import is_plain

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCORE = ["pipe", "--mode", "score", "--json"]


@pytest.fixture
def settings(undisturbed, monkeypatch, tmp_path):
    """Write a settings file, which the program then reads; gives its path."""

    def write(text):
        path = tmp_path / "settings.toml"
        path.write_text(text, encoding="utf-8")
        monkeypatch.setenv("STREAMCHAT_CONFIG", str(path))
        return path

    return write


def held(command, *call):
    """What `config show --json` says of one command: key to (value, source)."""
    done = command("config", "show", "--json", *call)
    assert done.code == 0, done.err
    own = json.loads(done.out)["settings"][call[0]]
    return {key: (setting["value"], setting["source"]) for key, setting in own.items()}


# What wins

PLACES = {
    # option: flag, variable, command's table, top, default
    "window": ("1", "2", "3", "4", "1020"),
    "temperature": (0.1, 0.2, 0.3, 0.4, 0.7),
    "policy": ("dense", "h2o", "window", "snapkv", "sink"),
    "quiet": (False, True, False, True, False),
    "plain": (True, False, True, False, False),
    "color": ("never", "always", "never", "always", "auto"),
}


@pytest.mark.parametrize("name", PLACES)
def test_flag_then_variable_then_file_then_default(command, settings, monkeypatch, name):
    """In all 16 combinations of places the first of them that speaks is heard."""
    values = dict(
        zip(("flag", "environment", "table", "top", "default"), PLACES[name], strict=True)
    )
    for places in itertools.product([False, True], repeat=4):
        said = [place for place, is_said in zip(values, places, strict=False) if is_said]
        top = f"{name} = {json.dumps(values['top'])}\n" if "top" in said else ""
        own = f"{name} = {json.dumps(values['table'])}\n" if "table" in said else ""
        settings(f"{top}[chat]\n{own}")
        flag = []
        if "flag" in said:
            value = values["flag"]
            on_off = {True: [f"--{name}"], False: [f"--no-{name}"]}
            flag = on_off[value] if isinstance(value, bool) else [f"--{name}", str(value)]
        with monkeypatch.context() as patch:
            if "environment" in said:
                value = values["environment"]
                variable = str(int(value) if isinstance(value, bool) else value)
                patch.setenv(f"STREAMCHAT_{name.upper()}", variable)
            first = [*said, "default"][0]
            source = {"table": "file", "top": "file"}.get(first, first)
            assert held(command, "chat", *flag)[name] == (values[first], source), said


def test_a_command_does_what_is_shown(command, settings, tiny_folder, monkeypatch):
    """The window that a stream has comes from the file, the variable, the flag, in this order."""
    settings(f"model = {json.dumps(str(tiny_folder))}\ndevice = 'cpu'\n[pipe]\nwindow = 8\n")

    def window(*args):
        done = command(*SCORE, *args, stdin=b"x\n")
        return json.loads(done.out.splitlines()[0])["window_size"]

    assert window() == 8
    monkeypatch.setenv("STREAMCHAT_WINDOW", "9")
    assert window() == 9
    assert window("--window", "10") == 10


def test_a_table_is_for_its_command_only(command, settings):
    """What stands in [chat] does not hold for pipe; what stands at the top holds for both."""
    settings("top-k = 5\n[chat]\ntop-p = 0.5\n")
    assert held(command, "chat")["top-p"] == (0.5, "file")
    assert held(command, "pipe")["top-p"] == (1.0, "default")
    assert held(command, "chat")["top-k"] == held(command, "pipe")["top-k"] == (5, "file")


@pytest.mark.parametrize("spelling", ["max-new", "max_new"])
def test_a_key_may_be_spelled_like_the_flag_or_like_the_variable(command, settings, spelling):
    """Dashes or underscores."""
    settings(f"[pipe]\n{spelling} = 7\n")
    assert held(command, "pipe")["max-new"] == (7, "file")


def test_lists_and_numbers_in_place_of_texts(command, settings):
    """`stop` is a list; a number may stand where a number or a word is meant."""
    settings('stop = ["a b", "c"]\nsinks = 0\n[bench]\ndepth = 4\n')
    assert held(command, "chat")["stop"] == (["a b", "c"], "file")
    assert held(command, "chat")["sinks"] == ("0", "file")
    assert held(command, "bench")["depth"] == ("4", "file")


@pytest.mark.parametrize("where", ["before", "after", "variable"])
def test_no_file_is_read_if_none_is_wanted(command, settings, monkeypatch, where):
    """--no-config on either side of the command, or an empty variable, even if the file is bad."""
    settings("nonsense = 1\n")
    call = ["config", "show", "--json", "chat"]
    assert command(*call).code == 2
    if where == "variable":
        monkeypatch.setenv("STREAMCHAT_CONFIG", "")
    else:
        call = ["--no-config", *call] if where == "before" else [*call, "--no-config"]
    done = command(*call)
    assert done.code == 0
    assert json.loads(done.out)["file"] is None


def test_a_flag_in_front_of_the_command_is_a_flag(command, settings, monkeypatch):
    """It wins over variable and file; the one behind the command wins over it."""
    settings("color = 'never'\n")
    monkeypatch.setenv("STREAMCHAT_COLOR", "auto")
    done = command("--color", "always", "config", "show", "--json", "chat")
    assert json.loads(done.out)["settings"]["chat"]["color"] == {
        "value": "always",
        "source": "flag",
    }
    done = command("--color", "always", "config", "show", "--json", "chat", "--color", "never")
    assert json.loads(done.out)["settings"]["chat"]["color"] == {"value": "never", "source": "flag"}


def test_quiet_in_the_file_is_undone_by_a_flag(command, settings, tiny_folder):
    """A switch that the file turns on has a flag that turns it off, on both sides."""
    settings(f"model = {json.dumps(str(tiny_folder))}\nquiet = true\n")
    assert command(*SCORE, stdin=b"x\n").err == ""
    assert "end of input" in command(*SCORE, "--no-quiet", stdin=b"x\n").err
    assert "end of input" in command("--no-quiet", *SCORE, stdin=b"x\n").err


# What is refused

REFUSED = {
    "modle = 'x'": "modle: unknown key; did you mean 'mode' or 'model'?",
    "windows = 9": "windows: unknown key; did you mean 'window'?",
    "zzz = 1": "zzz: unknown key",
    "[caht]\nwindow = 3": "caht: unknown key; did you mean 'chat'?",
    "[chat]\nmax-mew = 3": "chat.max-mew: unknown key; did you mean 'max-new'?",
    "[chat]\ndepth = '4'": "chat.depth: belongs into [bench]",
    "[pipe]\nsystem = 'x'": "pipe.system: belongs into [chat]",
    "trust-remote-code = true": "trust-remote-code: can be given on the command line only",
    "[bench]\nppl = 'book.txt'": "bench.ppl: can be given on the command line only",
    "chat = 3": "chat: must be a table, [chat], got 3",
    "model = 3": "model: must be a text in quotes, got 3",
    "quiet = 1": "quiet: must be true or false, got 1",
    "quiet = 'yes'": "quiet: must be true or false, got 'yes'",
    "top-k = 1.5": "top-k: must be a whole number, got 1.5",
    "top-k = true": "top-k: must be a whole number, got true",
    "temperature = 'hot'": "temperature: must be a number, got 'hot'",
    "temperature = -1": "temperature: temperature must be at least 0, got -1",
    "temperature = nan": "temperature: temperature must be at least 0, got nan",
    "top-p = 7": "top-p: top_p must be in (0, 1], got 7",
    "[chat]\nmax-new = 0": "chat.max-new: must be a whole number from 1 on, got 0",
    "window = 0": "window: --window must be auto or a number of tokens from 1 on, got '0'",
    "window = 'many'": "window: --window must be auto or a number of tokens from 1 on, got 'many'",
    "window = [1]": "window: must be a whole number, or a text in quotes, got [1]",
    "dtype = 'float8'": "dtype: must be one of auto, float32, bfloat16, float16, got 'float8'",
    "device = 'gpu'": "device: must be auto, cpu, cuda, cuda:N or mps, got 'gpu'",
    "color = 'red'": "color: must be one of auto, always, never, got 'red'",
    # At the top it would be for chat, too, which takes one policy only.
    "policy = 'sink,window'": "policy: must be one of sink, window, dense, recompute, h2o, snapkv",
    "stop = 'x'": 'stop: must be a list such as ["one", "two"], got \'x\'',
    "stop = [1]": 'stop: must be a list such as ["one", "two"], got [1]',
    "[pipe]\nevery = 'often'": (
        "pipe.every: --every must be like 600tok, 60s, 5m or 1h, got 'often'"
    ),
    "[bench]\ndepth = '0'": "bench.depth: --depth must be at least 1, got 0",
    "prompts = 3": "prompts: must be a table, [prompts], got 3",
    "[prompts]\na = 3": "prompts.a: must be a text in quotes, got 3",
    "[prompts]\na = ' '": "prompts.a: must be a text in quotes, got ' '",
    "[theme]\npined = 'red'": "theme.pined: unknown style; there are notice, thinking",
    "[theme]\npinned = 'no colour'": "theme.pinned: must be a Rich style such as 'bold cyan'",
    "[theme]\npinned = 3": "theme.pinned: must be a text in quotes, got 3",
    "window = \n": "not TOML: Invalid value (at line 1, column 10)",
    "window = 1\nwindow = 2": "not TOML: ",
}


@pytest.mark.parametrize("text", REFUSED, ids=repr)
def test_what_is_wrong_is_one_line_with_the_file_and_the_key(command, settings, text):
    """Exit 2 and one line, whichever command reads the file; nothing on standard output."""
    path = settings(text)
    done = command("chat", stdin=b"hello\n")
    assert done.code == 2
    assert done.out == ""
    [line] = done.err.splitlines()
    assert line.startswith(f"streamchat: {path}: {REFUSED[text]}")


def test_what_a_command_alone_allows_may_stand_in_its_table(command, settings):
    """Several policies are right in [bench], as is one for the others beside it."""
    settings("policy = 'h2o'\n[bench]\npolicy = 'sink,window'\n")
    assert held(command, "bench")["policy"] == ("sink,window", "file")
    assert held(command, "chat")["policy"] == ("h2o", "file")


def test_a_file_that_is_not_there_or_cannot_be_read(command, settings, tmp_path, monkeypatch):
    """Named, it must be there; a folder, or bytes that are no UTF-8, are said to be that."""
    monkeypatch.setenv("STREAMCHAT_CONFIG", str(tmp_path / "none.toml"))
    done = command("info")
    assert (done.code, done.err) == (
        2,
        f"streamchat: no such file: {tmp_path / 'none.toml'}, named by STREAMCHAT_CONFIG\n",
    )
    path = settings("")
    path.write_bytes(b"model = '\xff'\n")
    assert command("info").err == f"streamchat: {path}: not UTF-8\n"
    monkeypatch.setenv("STREAMCHAT_CONFIG", str(tmp_path))
    done = command("info")
    assert done.code == 2
    assert done.err.startswith(f"streamchat: cannot read {tmp_path}: ")


@pytest.mark.parametrize(
    "call",
    [["--help"], ["--version"], ["chat", "--help"], ["config", "path"], ["config"]],
    ids=" ".join,
)
def test_a_bad_file_is_in_the_way_of_nothing_that_could_mend_it(command, settings, call):
    """Help, version and the commands that find and edit the file do not read it."""
    settings("nonsense = 1\n")
    assert command(*call).code == 0


def test_the_traceback_of_a_bad_file_is_shown_on_request(command, settings):
    """--debug behind the command holds before the file is read."""
    settings("nonsense = 1\n")
    assert "Traceback" not in command("chat").err
    assert "Traceback" in command("chat", "--debug").err


# Prompts and styles


def test_prompts_are_texts_by_name(settings):
    """Read and checked with the file; for commands, `Session.config.prompts`."""
    settings('[prompts]\nminutes = "Write minutes."\nfr = """\nTranslate\nto French."""\n')
    assert load(table()).prompts == {"minutes": "Write minutes.", "fr": "Translate\nto French."}


def test_styles_hold_for_the_run_and_no_longer(command, settings, tiny_folder):
    """A style of the file replaces its default; without the file the default is back."""
    settings(f"model = {json.dumps(str(tiny_folder))}\n[theme]\npinned = 'bold magenta'\n")
    command(*SCORE, stdin=b"x\n")
    assert theme.style("pinned") == "bold magenta"
    assert theme.style("window") == theme.STYLES["window"]
    command("--no-config", *SCORE, "-m", tiny_folder, stdin=b"x\n")
    assert theme.style("pinned") == theme.STYLES["pinned"]


def test_every_style_has_a_meaning():
    """The table of the page and the comments of the file are whole."""
    assert theme.MEANINGS.keys() == theme.STYLES.keys()
    for name, style in theme.STYLES.items():
        theme.check(name, style)


# path, show, edit


def test_path_is_in_the_systems_place_unless_a_file_is_named(command, monkeypatch, tmp_path):
    """Named, the default, and none."""
    monkeypatch.setenv("STREAMCHAT_CONFIG", "/some/where.toml")
    assert Path(command("config", "path").out.strip()) == Path("/some/where.toml")
    monkeypatch.delenv("STREAMCHAT_CONFIG")
    monkeypatch.setattr(config_file, "user_config_path", lambda *_, **__: tmp_path)
    assert command("config", "path").out == f"{tmp_path / 'config.toml'}\n"
    monkeypatch.setenv("STREAMCHAT_CONFIG", "")
    done = command("config", "path")
    assert (done.code, done.out) == (0, "")
    assert "no settings file is read" in done.err


def test_show_has_one_row_for_what_is_the_same(command, settings, monkeypatch):
    """A shared setting stands once with its source; where commands differ, each has a row."""
    monkeypatch.setenv("STREAMCHAT_SINKS", "2")
    settings('window = 60\n[pipe]\nmax-new = 5\n[prompts]\na = "b"\n[theme]\nfull = "red"\n')
    done = command("config", "show")
    rows = {line.split()[0]: line.split()[1:] for line in done.out.splitlines()}
    assert rows["window"] == ['"60"', "file"]
    assert rows["sinks"] == ['"2"', "environment", "STREAMCHAT_SINKS"]
    assert rows["pipe.max-new"] == ["5", "file"]
    assert rows["chat.max-new"] == ["1024", "default"]
    assert rows["prompts.a"] == ['"b"', "file"]
    assert rows["theme.full"] == ['"red"', "file"]
    assert rows["chat.system"] == ["-", "default"]
    assert "max-new" not in rows
    assert done.err == ""


def test_show_refuses_what_the_command_would(command):
    """An unknown command, and a bad option of a known one."""
    done = command("config", "show", "chta")
    assert (done.code, done.out) == (2, "")
    assert "no such command: chta; there are chat, pipe, bench, info" in done.err
    done = command("config", "show", "chat", "--nonsense")
    assert (done.code, done.out) == (2, "")
    assert "No such option: --nonsense" in done.err


@pytest.fixture
def editor(monkeypatch, tmp_path):
    """A program that appends a text to the file it is given, as $EDITOR."""
    monkeypatch.delenv("VISUAL", raising=False)

    def make(text="", code=0):
        script = tmp_path / "edit or.py"
        script.write_text(
            f"import sys\nopen(sys.argv[-1], 'a').write({text!r})\nsys.exit({code})\n",
            encoding="utf-8",
        )
        monkeypatch.setenv("EDITOR", f"'{sys.executable}' '{script}'")

    return make


def test_edit_makes_a_file_opens_it_and_checks_it(command, monkeypatch, tmp_path, editor):
    """Made once; what was typed is there afterwards, and is checked."""
    path = tmp_path / "new" / "config.toml"
    monkeypatch.delenv("STREAMCHAT_CONFIG")
    monkeypatch.setattr(config_file, "user_config_path", lambda *_, **__: path.parent)
    editor("#end\n")
    done = command("config", "edit")
    assert (done.code, done.out) == (0, "")
    assert f"made {path}" in done.err
    assert f"{path} is all right" in done.err
    assert path.read_text(encoding="utf-8") == template(table()) + "#end\n"
    editor("nonsense = 'x'\n")
    done = command("config", "edit")
    assert done.code == 2
    assert "made" not in done.err
    assert f"{path}: theme.nonsense: unknown style" in done.err  # it was added at the end
    editor("", code=3)
    done = command("config", "edit")
    assert done.code == 1
    assert "ended with 3" in done.err


def test_edit_without_an_editor_says_what_to_do(command, settings, monkeypatch):
    """None set, one that is not there, and no file wanted: exit 2 and one line."""
    path = settings("")
    for name in ("VISUAL", "EDITOR"):
        monkeypatch.delenv(name, raising=False)
    done = command("config", "edit")
    assert (done.code, done.err) == (
        2,
        f"streamchat: no editor: set VISUAL or EDITOR, or open {path} yourself\n",
    )
    monkeypatch.setenv("VISUAL", "/no/such/editor")
    done = command("config", "edit")
    assert done.code == 2
    assert "cannot start the editor /no/such/editor: " in done.err
    monkeypatch.setenv("STREAMCHAT_CONFIG", "")
    assert "no settings file is read" in command("config", "edit").err


def test_the_file_that_is_made_has_everything_and_changes_nothing(command, settings):
    """As it is it sets nothing; with every default taken out of its comment, the same holds."""
    text = template(table())
    before = held(command, "chat"), held(command, "pipe"), held(command, "bench")
    assert tomllib.loads(text) == {"chat": {}, "pipe": {}, "bench": {}, "prompts": {}, "theme": {}}
    lines = []
    for line in text.splitlines():
        is_setting = line.startswith("#") and not line.startswith(("# ", "##")) and line != "#"
        lines.append(line[1:] if is_setting and not line.endswith("=") else line)
    settings("\n".join(lines))
    after = held(command, "chat"), held(command, "pipe"), held(command, "bench")
    values = [{key: value for key, (value, _) in own.items()} for own in (*before, *after)]
    assert values[:3] == values[3:]
    sources = {source for own in after for value, source in own.values() if value not in (None, [])}
    assert sources == {"file"}
    keys = {setting.key for own in table().values() for setting in own if setting.envvar}
    assert not [key for key in keys if f"\n#{key} =" not in text]


def test_variables_are_named_after_their_options():
    """STREAMCHAT_ and the flag, everywhere."""
    for settings in table().values():
        for setting in settings:
            name = setting.key.replace("-", "_").upper()
            assert setting.envvar in (None, f"STREAMCHAT_{name}")


def test_an_option_that_a_file_may_set_can_be_unset_by_a_flag():
    """Switches have a negative, so that a flag wins over the file in both directions."""
    for settings in table().values():
        for setting in settings:
            if setting.kind is bool and setting.envvar:
                assert len([flag for flag in setting.flags if flag.startswith("--")]) == 2


# What it costs


@pytest.mark.parametrize(
    "args",
    [["config", "path"], ["config", "show"], ["chat", "--help"], ["chat", "--no-such"]],
    ids=" ".join,
)
def test_settings_are_read_without_torch(args):
    """Neither torch nor transformers is imported for what only looks at options."""
    code = (
        "import sys; from streamchat.cli import app; "
        f"app.run({args!r}); print('LOADED', {{'torch', 'transformers'}} & {{*sys.modules}})"
    )
    assert _python(code).splitlines()[-1] == "LOADED set()"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("streamchat conf", {"config"}),
        ("streamchat chat --dev", {"--device", "--device-map"}),
        ("streamchat chat --dtype ", {"auto", "float32", "bfloat16", "float16"}),
        ("streamchat config sh", {"show"}),
    ],
)
def test_completion_knows_commands_options_and_choices_and_imports_no_torch(
    settings, words, expected
):
    """As bash asks for it; a settings file that is wrong is not in its way."""
    settings("nonsense = 1\n")
    code = (
        "import sys; from streamchat.cli import app; "
        "app.run([]); print('LOADED', {'torch', 'transformers'} & {*sys.modules})"
    )
    asked = {
        "_STREAMCHAT_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    *found, loaded = _python(code, asked).splitlines()
    assert set(found) == expected
    assert loaded == "LOADED set()"


def _python(code, environment=None):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(streamchat.__file__).parents[1]),
            "PYTHONIOENCODING": "utf-8",
            **(environment or {}),
        },
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    return done.stdout


# Plain words


@pytest.mark.parametrize("where", ["flag", "variable", "file"])
def test_plain_can_be_asked_for_anywhere(command, settings, tiny_folder, monkeypatch, where):
    """The flag, the variable, the file."""
    settings(f"model = {json.dumps(str(tiny_folder))}\n{'plain = true' if where == 'file' else ''}")
    if where == "variable":
        monkeypatch.setenv("STREAMCHAT_PLAIN", "1")
    command(*SCORE, stdin=b"x\n")
    assert is_plain() is (where != "flag")
    command(*SCORE, "--plain", stdin=b"x\n")
    assert is_plain()
    command(*SCORE, "--no-plain", stdin=b"x\n")
    assert not is_plain()


def test_load_needs_no_file_in_the_default_place(undisturbed, monkeypatch, tmp_path):
    """Nobody has to have one; a bad one there is refused like any other."""
    monkeypatch.delenv("STREAMCHAT_CONFIG")
    monkeypatch.setattr(config_file, "user_config_path", lambda *_, **__: tmp_path)
    assert load(table()).defaults == {}
    (tmp_path / "config.toml").write_text("a = 1\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"config\.toml: a: unknown key"):
        load(table())
