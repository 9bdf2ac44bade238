"""docs/formats.md is what `docs/formats.py` makes of the code."""

import importlib.util
import sys
from pathlib import Path

import pytest
from pages import stale

from streamchat.pipe.formats import table
from streamchat.pipe.formats.detect import guess

SCRIPT = Path(__file__).parents[1] / "docs" / "formats.py"


@pytest.fixture
def formats():
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("docs_formats", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_written_is_up_to_date(formats):
    """Run `python docs/formats.py` after a change of formats."""
    assert stale(formats.wanted()) == []


def test_each_format_has_a_row_and_a_sample_that_is_known(formats):
    """`auto` would take each sample for what it is, and its reader finds words in it."""
    page = formats.page()
    for name in table.FORMATS:
        assert page.count(f"\n| `{name}` |") == page.count(f"\n## {name}\n") == 1
        first = [line for line in formats.SAMPLES[name].split("\n") if line]
        assert (guess(first[:1], is_whole=True) or guess(first[:2], is_whole=True)) == name
        assert " ".join(cue.text for cue in formats.cues(name)).count("Friday") == 1


def test_check_writes_nothing_and_says_what_is_stale(formats, monkeypatch, tmp_path):
    """Exit 1 with the name of the file; without --check it is written."""
    monkeypatch.setattr(formats, "PAGE", tmp_path / "formats.md")
    monkeypatch.setattr(sys, "argv", ["formats.py", "--check"])
    with pytest.raises(SystemExit, match=r"out of date: formats\.md; run python"):
        formats.main()
    assert not formats.PAGE.exists()
    monkeypatch.setattr(sys, "argv", ["formats.py"])
    formats.main()
    monkeypatch.setattr(sys, "argv", ["formats.py", "--check"])
    formats.main()
