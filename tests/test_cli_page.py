"""docs/cli.md is what `docs/cli.py` makes of the code; every help fits and has examples."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import typer
from pages import stale

from streamchat import errors
from streamchat.cli.app import app
from streamchat.cli.signals import EXIT_CODES

SCRIPT = Path(__file__).parents[1] / "docs" / "cli.py"

GIVEN = {"--help", "--install-completion", "--show-completion"}
"""Options that typer adds; the page has them in words."""


@pytest.fixture
def page():
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("docs_cli", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parsers():
    """Every command as the parser has it, by its name."""
    top = typer.main.get_command(app)
    found = {"": top}
    for name, command in top.commands.items():
        if hasattr(command, "commands"):
            found |= {f"{name} {inner}": own for inner, own in command.commands.items()}
        else:
            found[name] = command
    return found


def test_what_is_written_is_up_to_date(page):
    """Run `python docs/cli.py` after a change of commands or options."""
    assert stale(page.wanted()) == []


@pytest.mark.parametrize("name", parsers())
def test_the_page_has_what_the_parser_knows(page, name):
    """Names, default, variable and help of each option, as the parser itself has them."""
    title = f"\n## {'streamchat ' + name if name else 'streamchat'}\n"
    assert page.page().count(title) == 1
    section = page.page().split(title)[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][2:]
    parameters = [own for own in parsers()[name].params if not GIVEN & set(own.opts)]
    assert len(rows) == len(parameters)
    for row, parameter in zip(rows, parameters, strict=True):
        names, default, variable, meaning = re.split(r" (?<!\\)\| ", row[2:-2])
        flags = [*parameter.opts, *parameter.secondary_opts]
        if parameter.param_type_name == "option":
            assert set(re.findall(r"`(-[\w-]+)`", names)) == set(flags)
        assert variable.strip("` ") == (parameter.envvar or "")
        assert meaning.strip().replace("\\|", "|") == parameter.help
        value = getattr(parameter.default, "value", parameter.default)
        assert default.strip("` ") == ("" if value is None or value is False else str(value))


@pytest.mark.parametrize("name", [*parsers(), "config", "sessions"])
def test_help_fits_80_columns_whole_and_has_examples(command, monkeypatch, name):
    """No line is longer, no name of an option or a variable is cut, and there is an example."""
    monkeypatch.setenv("COLUMNS", "80")
    done = command(*name.split(), "--help")
    assert done.code == 0
    assert max(map(len, done.out.splitlines())) <= 80
    assert "…" not in done.out
    assert "..." not in done.out.split("Options:")[1].split("Examples:")[0]
    assert re.search(rf"streamchat {name}".rstrip(), done.out.split("Examples:")[1])
    for parameter in parsers()[name].params if name in parsers() else []:
        shown = [parameter.envvar] if parameter.envvar else []
        if parameter.param_type_name == "option":
            shown += [*parameter.opts, *parameter.secondary_opts]
        assert not [
            text for text in shown if not re.search(rf"(?<![\w-]){text}(?![\w-])", done.out)
        ]


def test_exit_codes_are_those_of_the_errors(page):
    """A row for each code that an error, or a signal, ends with."""
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", page.page(), re.MULTILINE)}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert codes == {0, 129, *EXIT_CODES.values(), *(kind.exit_code for kind in kinds)}


def test_check_writes_nothing_and_says_what_is_stale(page, monkeypatch, tmp_path):
    """Exit 1 with the name of the file; without --check it is written."""
    monkeypatch.setattr(page, "PAGE", tmp_path / "cli.md")
    monkeypatch.setattr(sys, "argv", ["cli.py", "--check"])
    with pytest.raises(SystemExit, match=r"out of date: cli\.md; run python"):
        page.main()
    assert not page.PAGE.exists()
    monkeypatch.setattr(sys, "argv", ["cli.py"])
    page.main()
    monkeypatch.setattr(sys, "argv", ["cli.py", "--check"])
    page.main()
