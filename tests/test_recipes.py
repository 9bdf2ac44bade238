"""`--prompt @name`: what comes with the program, and what the settings add."""

from pathlib import Path

import pytest

from streamchat import UsageError
from streamchat.cli.recipes import RECIPES, find

OWN = {"pirate": "Say it like a pirate.", "to": "Translate to {}.", "tag": "Mine."}


def test_a_prompt_that_names_nothing_is_itself():
    """Whatever is in it, braces too; `@@` is an at sign."""
    for text in ("Be brief.", "a@b {}", ""):
        assert find(text, OWN).text == text
        assert find(text, OWN).mode is None
    assert find(None, OWN).text == ""
    assert find("@@home: answer", {}).text == "@home: answer"


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_that_come_along(name):
    """Each has an instruction without a gap, a mode and a meaning."""
    found = find(f"@{name}", {})
    assert found.text
    assert "{}" not in found.text
    assert found.mode in ("notes", "reply")
    assert RECIPES[name].meaning


def test_words_stand_where_the_recipe_has_a_place_for_them():
    """Or what the recipe has for want of any."""
    assert "to French." in find("@translate:French", {}).text
    assert "to English." in find("@translate", {}).text
    assert find("@to:Swiss German: Bern", OWN).text == "Translate to Swiss German: Bern."


def test_the_users_own_win():
    """Over those of the same name that come along; they choose no mode."""
    assert find("@tag", OWN).text == "Mine."
    assert find("@tag", OWN).mode is None
    assert find("@pirate", OWN).text == "Say it like a pirate."


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("@nobody", "no recipe is called '@nobody'; there are @alert, .*@pirate, .*@translate"),
        ("@", "no recipe is called '@'"),
        ("@pirate:now", "@pirate takes no words after it, got 'now'"),
        ("@to", "@to needs words, as in @to:WORDS"),
        ("@to:  ", "@to needs words"),
    ],
)
def test_what_fits_no_recipe_is_refused(prompt, words):
    """With what there is, or what is missing."""
    with pytest.raises(UsageError, match=words):
        find(prompt, OWN)


def test_the_page_names_all_recipes():
    """docs/pipe.md has each of them, with what it is for."""
    page = (Path(__file__).parents[1] / "docs" / "pipe.md").read_text(encoding="utf-8")
    for name, recipe in RECIPES.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `@{name}")]
        assert recipe.meaning.partition(":")[0] in row
