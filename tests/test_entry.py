"""What numba keeps of compiled functions, damaged or older than the sources."""

import importlib.util
import os
import textwrap

import numpy as np
import pytest

SOURCE = """
from streamchat.ops.compiled.entry import Entry

@Entry
def double(thread, x):
    for index in range(x.size):
        x[index] *= 2
"""


@pytest.fixture
def module(tmp_path):
    """A module with a compiled function; each call imports it anew, as a new process would."""
    path = tmp_path / "doubling.py"
    path.write_text(textwrap.dedent(SOURCE))

    def load():
        spec = importlib.util.spec_from_file_location("doubling", path)
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
        return found

    return load


def doubled(module):
    x = np.arange(3.0)
    module.double(0, x)
    return x.tolist()


def test_a_function_is_kept(module):
    """The second process finds what the first one compiled."""
    first = module()
    assert not first.double.is_kept
    assert not first.double.is_ready
    assert doubled(first) == [0, 2, 4]
    assert first.double.is_ready
    second = module()
    assert second.double.is_kept
    assert doubled(second) == [0, 2, 4]
    assert sum(second.double._compiled.stats.cache_hits.values()) == 1


@pytest.mark.parametrize("suffix", [".nbc", ".nbi"])
@pytest.mark.parametrize("size", [0, 100])
def test_a_damaged_file_is_made_again(module, suffix, size):
    """Cut to nothing or in the middle: the function works, and is kept again."""
    first = module()
    doubled(first)
    [file] = [file for file in first.double._kept() if file.suffix == suffix]
    whole = file.read_bytes()
    assert len(whole) > size
    file.write_bytes(whole[:size])
    assert doubled(module()) == [0, 2, 4]
    assert doubled(module()) == [0, 2, 4]
    assert module().double.is_kept


def test_what_is_older_than_the_sources_is_not_used(module):
    """A change of what the function calls, in another file, is a reason to compile."""
    first = module()
    doubled(first)
    for file in first.double._kept():
        os.utime(file, (1, 1))
    second = module()
    assert not second.double.is_kept
    assert doubled(second) == [0, 2, 4]
    assert not second.double._compiled.stats.cache_hits


def test_an_error_of_the_function_itself_is_raised(module):
    """What numba cannot compile is not tried for ever."""
    with pytest.raises(Exception, match=r"text|setitem|typing|Cannot"):
        module().double(0, "text")
