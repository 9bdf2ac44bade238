"""docs/models.md and the README's sentence are what `docs/models.py` makes of the code."""

import importlib.util
import sys
from pathlib import Path

import pytest
from families import ROWS, family_config, family_model
from pages import stale

from streamchat.model.families import FAMILIES, Family, geometry_of
from streamchat.model.prepare import prepare

SCRIPT = Path(__file__).parents[1] / "docs" / "models.py"


@pytest.fixture(scope="module")
def models():
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("docs_models", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def test_what_is_written_is_up_to_date(models):
    """Run `python docs/models.py` after a change of families."""
    assert stale(models.wanted()) == []


def test_every_family_has_a_line_and_the_count_is_right(models):
    """The count of the README, and a row for each `model_type`."""
    page, readme = models.page(), models.README.read_text(encoding="utf-8")
    assert f"[{len(FAMILIES)} model families](docs/models.md)" in readme
    for name in FAMILIES:
        assert page.count(f"| `{name}` |") == 1
    assert page.count("\n| ") == len(FAMILIES) + len(models.REFUSED) + 4  # two heads of two lines


def test_a_new_family_makes_the_page_stale(models, monkeypatch):
    """The page follows the data: a family that does something else is said to."""
    monkeypatch.setitem(models.FAMILIES, "llama", Family(rotates="listed"))
    monkeypatch.setattr(
        type(family_config("llama")), "no_rope_layers", [1, 0] + [1] * 30, raising=False
    )
    assert stale(models.wanted()) == ["models.md"]
    line = next(line for line in models.page().splitlines() if "`llama`" in line)
    assert "RoPE, none in 1 of 32 layers" in line
    assert "Which layers have rotary positions" in line


def test_check_writes_nothing_and_says_what_is_stale(models, monkeypatch, tmp_path):
    """Exit 1 with the name of the file; without --check the file is written."""
    page = tmp_path / "models.md"
    monkeypatch.setattr(models, "PAGE", page)
    monkeypatch.setattr(models, "README", tmp_path / "README.md")
    models.README.write_text(f"a\n{models.BEGIN}old\n{models.END}b\n", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["models.py", "--check"])
    with pytest.raises(SystemExit, match=r"out of date: models\.md, README\.md; run python"):
        models.main()
    assert not page.exists()
    monkeypatch.setattr(sys, "argv", ["models.py"])
    models.main()
    assert stale(models.wanted()) == []
    text = models.README.read_text(encoding="utf-8")
    assert text.startswith(f"a\n{models.BEGIN}Supported today")
    assert text.endswith(f"{models.END}b\n")


@pytest.mark.parametrize("name", ROWS)
def test_how_much_of_a_head_is_turned_is_what_the_model_does(models, name):
    """The share that is read from a configuration is that of the model's own table."""
    geometry = geometry_of(prepare(family_model(name, num_layers=1)))
    share = models.rotary_share(family_config(name, num_layers=1))
    assert geometry.rotary_dim == share * geometry.head_dim


def test_refusals_are_reasons_in_one_line(models):
    """Each with its configuration; the list of what is supported is not repeated in each."""
    found = models.refusals()
    assert len(found) == len(models.REFUSED)
    for what, reason in found:
        assert what.startswith("`")
        assert "\n" not in reason
        assert "supported:" not in reason
