"""Saved states: bit for bit what was saved, or an error of ours says why not; never a mix.

What a whole file says is held to safetensors' own reader, damage to the bytes of a whole file.
"""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from damage import EDITS, damaged
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_folder import needs_permissions, unprivileged  # noqa: F401 - a fixture
from test_log import small_disk  # noqa: F401 - a fixture

import streamchat
from streamchat.errors import DamagedError, SessionError
from streamchat.store.files import clean, put_aside
from streamchat.store.state import SavedState, differences, load, save

FINGERPRINT = {"model": "tiny", "sink_size": 4, "window_size": 60, "dtype": "float32"}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state.safetensors"


def small_state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return SavedState(
        FINGERPRINT,
        {"num_seen": 2**40 + seed, "text": "caf\xe9 \u4f1a\x00", "nested": [{"a": None}, 0.1]},
        {
            "keys": torch.randn(2, 1, 3, 5, 4, generator=generator),
            "recent_ids": torch.arange(7) + seed,
        },
    )


def assert_same(one, other):
    """Bit for bit, NaN and all."""
    assert one.fingerprint == other.fingerprint
    assert one.meta == other.meta
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype
        assert tensor.shape == other.tensors[name].shape
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, other.tensors[name])]
        assert torch.equal(*bits)


# What goes in comes out


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]),
        torch.randn(3, 4).to(torch.bfloat16),
        torch.randn(3, 4).to(torch.float16),
        torch.randn(3, 4).to(torch.float8_e4m3fn),
        torch.tensor([2**62, -1]),
        torch.arange(5, dtype=torch.int8),
        torch.tensor([True, False]),
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.randn(6, 8).T,
        torch.randn(40, 8)[3],
        torch.randn(4, requires_grad=True),
    ],
    ids=str.split("special bf16 fp16 fp8 int64 int8 bool scalar empty transposed view graph"),
)
def test_tensors_come_back_bit_for_bit(path, tensor):
    """Whatever their dtype, shape and storage; what was not wanted of a storage is not saved."""
    state = SavedState({}, {}, {"a": tensor, "b": tensor})
    save(path, state)
    assert_same(load(path), state)
    assert path.stat().st_size < 2 * tensor.nbytes + 2000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(meta=st.dictionaries(st.text(), JSON, max_size=3))
def test_whatever_json_can_say_comes_back(path, meta):
    """Any text, surrogates included, numbers of any size; a state may have no tensor."""
    state = SavedState(FINGERPRINT, meta, {})
    save(path, state)
    assert_same(load(path), state)


def test_the_file_is_plain_safetensors(path):
    """Any reader of the format reads it: nothing in it needs this program."""
    state = small_state()
    save(path, state)
    assert torch.equal(load_file(path)["keys"], state.tensors["keys"])
    with safe_open(path, framework="pt") as file:
        described = file.metadata()
    assert described["format"] == "streamchat-state"
    assert described["version"] == "1"
    assert json.loads(described["meta"])["num_seen"] == 2**40


def test_what_was_loaded_does_not_depend_on_the_file(path):
    """It is a copy: the file can be replaced or destroyed while it is used."""
    state = small_state()
    save(path, state)
    loaded = load(path)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert_same(loaded, state)


def test_a_state_takes_the_place_of_the_one_before(path, tmp_path):
    """Nothing else is left in the folder."""
    for seed in range(3):
        save(path, small_state(seed))
        assert_same(load(path), small_state(seed))
    assert list(tmp_path.iterdir()) == [path]


def test_fingerprints_are_compared_in_words():
    """What was and what is, also where only one of them has it."""
    assert differences(FINGERPRINT, dict(FINGERPRINT)) == []
    now = {**FINGERPRINT, "window_size": 1020, "policy": "sink"}
    assert differences(FINGERPRINT, now) == [
        "window_size was 60, is 1020",
        "policy was None, is sink",
    ]


def test_importing_the_store_imports_no_torch():
    """Whoever lists or searches sessions does not wait for it."""
    code = (
        "import sys, streamchat.store.log, streamchat.store.recall, streamchat.store.folder, "
        "streamchat.store.state, streamchat.store.background; "
        "print({'torch', 'transformers', 'safetensors'} & {*sys.modules})"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(streamchat.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


# Files that are not what they should be


def rewritten(path, **changes):
    """The file with other words about it, and its tensors as they are."""
    with safe_open(path, framework="pt") as file:
        described = {**file.metadata(), **changes}
    save_file(load_file(path), path, metadata={k: v for k, v in described.items() if v})


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_bytes(b""), "is damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "is damaged"),
        (lambda path: path.write_bytes(bytes(path.stat().st_size)), "is damaged"),
        (lambda path: path.write_bytes(b"\x80\x04\x95cposix\nsystem\n."), "is damaged"),
        (lambda path: torch.save({"a": torch.zeros(2)}, path), "is damaged"),
        (lambda path: path.write_bytes(b"\xff" * 8 + path.read_bytes()), "is damaged"),
        (lambda path: save_file({"a": torch.zeros(2)}, path), "is not a saved state"),
        (lambda path: rewritten(path, format="other"), "is not a saved state"),
        (lambda path: rewritten(path, version="2"), "has format 2, this .* reads 1"),
        (lambda path: rewritten(path, version=None), "has format None"),
        (lambda path: rewritten(path, checksum=None), "its checksum does not match"),
        (lambda path: rewritten(path, meta='{"num_seen": 1}'), "its checksum does not match"),
        (lambda path: rewritten(path, more="x"), "its checksum does not match"),
    ],
    ids=str.split(
        "empty short zeroed pickle torch.save header-length foreign format newer no-version "
        "no-checksum other-meta more-meta"
    ),
)
def test_damaged_foreign_and_newer_files_are_refused(path, damage, reason):
    """With the reason, and left as they are: put aside, they make place for a new one."""
    save(path, small_state())
    damage(path)
    data = path.read_bytes()
    with pytest.raises(DamagedError, match=reason):
        load(path)
    aside = put_aside(path)
    assert aside.read_bytes() == data
    save(path, small_state(1))
    assert_same(load(path), small_state(1))


def test_a_pickle_is_never_executed(path, tmp_path):
    """A file that would make a folder if it were unpickled makes none."""
    made = tmp_path / "made"

    class Hostile:
        def __reduce__(self):
            return (os.mkdir, (str(made),))

    torch.save({"a": Hostile()}, path)
    with pytest.raises(DamagedError):
        load(path)
    assert not made.exists()


def test_a_file_that_is_too_large_is_not_read(path):
    """A hostile one, without blocks on the disk, would fill the memory."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}})
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    try:
        os.truncate(path, 8 + len(header) + 2**40)
    except OSError:
        pytest.skip("this file system has no holes of 1 TB")
    with pytest.raises(DamagedError, match=r"has 1,099,511,\S+ bytes, expected at most 1,000"):
        load(path, max_bytes=1000)


def test_a_state_that_is_not_there_or_not_readable_is_no_damage(path, tmp_path):
    """It must not be put aside."""
    with pytest.raises(SessionError, match=r"cannot read the state .*: No such file") as error:
        load(path)
    assert not isinstance(error.value, DamagedError)
    with pytest.raises(SessionError, match=r"cannot read the state .*directory") as error:
        load(tmp_path)
    assert not isinstance(error.value, DamagedError)


def check_damaged_state(path, edits):
    """The state that was saved, or an error of ours; any changed bit of it is noticed."""
    state = small_state()
    if not path.exists():
        save(path, state)
    fuzzed = path.with_name("fuzzed.safetensors")
    fuzzed.write_bytes(damaged(path.read_bytes(), edits))
    try:
        loaded = load(fuzzed)
    except DamagedError:
        return
    assert_same(loaded, state)


FUZZ = {"suppress_health_check": list(HealthCheck), "deadline": None}


@settings(max_examples=200, **FUZZ)
@given(edits=EDITS)
def test_a_damaged_state_raises_nothing_but_our_errors(path, edits):
    """Flipped, zeroed, cut, stretched."""
    check_damaged_state(path, edits)


@pytest.mark.slow
@settings(max_examples=12_000, **FUZZ)
@given(edits=EDITS)
def test_a_damaged_state_raises_nothing_but_our_errors_at_length(path, edits):
    """The same for a minute."""
    check_damaged_state(path, edits)


VALUES = st.recursive(
    st.sampled_from(
        [None, True, -1, 0, 1, 2**31, 2**63, 2**64, 1e308, "F32", "I64", "BF16", "", {}]
    )
    | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "a", "meta"]), inner)
    ),
    max_leaves=6,
)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F64", "F8_E8M0", "F4", "BOOL", "C64", "U64", "F32"]) | VALUES,
        "shape": st.lists(st.sampled_from([0, 1, 2, 2**32, 2**63, -1]), max_size=4) | VALUES,
        "data_offsets": st.lists(st.sampled_from([0, 1, 4, 8, 16, 2**63, 2**64 - 1]), max_size=3),
    },
)
HEADERS = st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), ENTRIES | VALUES)


@settings(max_examples=300, **FUZZ)
@example({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, bytes(1))
@example({"a": {"dtype": "F8_E8M0", "shape": [1], "data_offsets": [0, 1]}}, bytes(1))
@example({"a": {"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 0]}}, b"")
@example({"__metadata__": {"format": "streamchat-state", "version": "1", "checksum": ""}}, b"")
@given(header=HEADERS, data=st.binary(max_size=16))
def test_a_hostile_header_raises_nothing_but_our_errors(path, header, data):
    """Well-formed lengths around whatever JSON can say of tensors."""
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    with pytest.raises(DamagedError):
        load(path)


# Disks and crashes


@needs_permissions
def test_a_state_is_the_owners_alone(path):
    """0600, whatever the umask."""
    before = os.umask(0)
    try:
        save(path, small_state())
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_written_is_one_line(unprivileged):  # noqa: F811 - the fixture
    """The state before can still be read."""
    path = unprivileged / "state.safetensors"
    save(path, small_state())
    unprivileged.chmod(0o500)
    try:
        with pytest.raises(SessionError, match=r"cannot save the state to .*: Permission denied"):
            save(path, small_state(1))
        assert_same(load(path), small_state())
    finally:
        unprivileged.chmod(0o700)


def test_a_full_disk_leaves_the_state_before(path, tmp_path, small_disk):  # noqa: F811 - likewise
    """One line, and no litter; with room again it is saved."""
    save(path, small_state())
    large = SavedState({}, {}, {"a": torch.ones(100_000)})
    small_disk(50_000)
    with pytest.raises(SessionError, match=r"cannot save the state to .*: .*too large"):
        save(path, large)
    small_disk(1 << 30)
    assert list(tmp_path.iterdir()) == [path]
    assert_same(load(path), small_state())
    save(path, large)
    assert_same(load(path), large)


# One process imports torch, which takes a while, and forks a writer for each round.
WRITERS = """
import os, sys
from pathlib import Path
import torch
from streamchat.store.files import clean
from streamchat.store.state import SavedState, save
torch.set_num_threads(1)
path = Path(sys.argv[1])
for line in sys.stdin:
    pid = os.fork()
    if pid:
        print("pid", pid, flush=True)
        os.waitpid(pid, 0)
        print("dead", flush=True)
        continue
    clean(path.parent)
    n = int(line)
    while True:
        save(path, SavedState({}, {"n": n}, {"a": torch.full((200_000,), n), "b": torch.tensor(n)}))
        os.write(1, f"saved {n}\\n".encode())
        n += 1
"""


def kill_while_saving(path, rounds):
    """Kill a process that saves one state after the other, and look at what is there."""
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(streamchat.__file__).parents[1]),
        "PYTHONWARNINGS": "ignore::DeprecationWarning",  # of forking beside torch's threads
    }
    process = subprocess.Popen(
        [sys.executable, "-c", WRITERS, str(path)],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    last, litter = 0, []
    try:
        for number in range(rounds):
            print(last + 1, file=process.stdin, flush=True)
            pid = int(process.stdout.readline().removeprefix("pid "))
            last = int(process.stdout.readline().removeprefix("saved "))
            time.sleep(0.0037 * (number % 9))  # to be killed in another place each time
            os.kill(pid, signal.SIGKILL)
            while (line := process.stdout.readline()) != "dead\n":
                last = int(line.removeprefix("saved "))
            state = load(path)
            n = state.meta["n"]
            assert last <= n <= last + 1
            assert torch.equal(state.tensors["a"], torch.full((200_000,), n))
            assert int(state.tensors["b"]) == n
            last = n
            litter.append(len(list(path.parent.iterdir())) - 1)
    finally:
        process.kill()
        process.communicate()
    assert max(litter) <= 1
    clean(path.parent)
    assert list(path.parent.iterdir()) == [path]


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


@needs_fork
def test_a_process_killed_while_it_saves_leaves_a_whole_state(path):
    """The last acknowledged state or the one after it; and no litter that grows."""
    kill_while_saving(path, 8)


@needs_fork
@pytest.mark.slow
def test_a_process_killed_fifty_times_leaves_a_whole_state(path):
    """The same, more often."""
    kill_while_saving(path, 50)
