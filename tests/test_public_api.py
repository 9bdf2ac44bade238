"""The public face: what `import streamchat` offers, and what it costs."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import streamchat
from streamchat import errors

EXIT_CODES = {
    "StreamchatError": 1,
    "StateError": 1,
    "StreamFullError": 1,
    "InputError": 1,
    "OutputError": 1,
    "SessionError": 1,
    "SessionInUseError": 1,
    "DamagedError": 1,
    "UsageError": 2,
    "ConfigError": 2,
    "ModelError": 3,
    "UnsupportedModelError": 3,
    "SelfCheckError": 3,
}


def public_members(owner):
    """Public methods and properties that a class defines itself."""
    return {
        name: member
        for name, member in vars(owner).items()
        if not name.startswith("_")
        and (inspect.isfunction(member) or isinstance(member, property | classmethod))
    }


def test_all_is_what_can_be_imported():
    """`__all__` is sorted, without repeats, and every name in it can be had from the package."""
    assert streamchat.__all__ == sorted(set(streamchat.__all__))
    for name in streamchat.__all__:
        assert getattr(streamchat, name).__name__ == name


def test_nothing_is_offered_that_all_does_not_name():
    """The lazy table and `__all__` name the same things."""
    assert sorted(streamchat._HOMES) == streamchat.__all__


def test_a_star_import_gives_exactly_the_public_names():
    """`from streamchat import *` binds the names of `__all__` and no others."""
    namespace = {}
    exec("from streamchat import *", namespace)
    assert sorted(set(namespace) - {"__builtins__"}) == streamchat.__all__


def test_an_unknown_name_is_an_attribute_error_with_the_name():
    """A misspelt name fails as in any module, so that `hasattr` works."""
    with pytest.raises(AttributeError, match="Streem"):
        _ = streamchat.Streem


@pytest.mark.parametrize("name", streamchat.__all__)
def test_every_public_name_says_what_it_is(name):
    """Each public name has a docstring of its own, and so has each of its public methods."""
    named = getattr(streamchat, name)
    # A dataclass without a docstring gets its signature for one.
    assert named.__doc__
    assert not named.__doc__.startswith(f"{name}(")
    if inspect.isclass(named):
        missing = [m for m, member in public_members(named).items() if not member.__doc__]
        assert missing == []


def test_every_error_is_public_and_carries_its_documented_exit_code():
    """The error tree is the one that the exit codes are documented for, with no other in it."""
    tree = {
        name: kind.exit_code
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, errors.StreamchatError)
    }
    assert tree == EXIT_CODES
    assert set(tree) <= set(streamchat.__all__)


@pytest.mark.parametrize(
    "statement",
    ["import streamchat", "from streamchat.cli import app; app.run(['--help'])"],
    ids=["import", "help"],
)
def test_it_starts_without_torch(statement):
    """Neither `import streamchat` nor `streamchat --help` imports torch or transformers."""
    code = (
        f"import sys; {statement}; print('LOADED', {{'torch', 'transformers'}} & {{*sys.modules}})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(streamchat.__file__).parents[1]),
            "PYTHONIOENCODING": "utf-8",
        },
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "LOADED set()"
