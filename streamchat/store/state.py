"""A state on disk: one safetensors file, with a format version, a fingerprint and a checksum.

What is in it is described by names, JSON and tensors; nothing that is read is ever executed. The
checksum is over all of it, so a file whose bits have changed is refused and not continued from.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamchat.errors import DamagedError, SessionError
from streamchat.store.files import replacing, told

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "streamchat-state"
VERSION = 1


@dataclass(frozen=True, slots=True)
class SavedState:
    """All that a stream needs to go on.

    Attributes:
        fingerprint: What must be the same to go on exactly: model, tokenizer, sizes, dtype, …;
            text and numbers.
        meta: Positions, counters, text, random state: whatever JSON can say.
        tensors: By name, on the CPU where they were loaded.
    """

    fingerprint: Mapping[str, str | int | float | bool | None]
    meta: Mapping[str, Any]
    tensors: Mapping[str, "Tensor"]


def save(path: Path, state: SavedState) -> None:
    """Write a state in place of the one before; a crash leaves one of the two.

    Takes, beside the tensors, no memory if they are on the CPU and contiguous, and a copy of those
    that are not.

    Raises:
        SessionError: If it cannot be written; the one before stays.
    """
    # Imported late: they import torch, and whoever only lists sessions does not need it.
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = _plain(state.tensors)
    described = {
        "format": FORMAT,
        "version": str(VERSION),
        "fingerprint": json.dumps(dict(state.fingerprint)),
        "meta": json.dumps(dict(state.meta)),
    }
    described["checksum"] = _checksum(described, tensors)
    with told(f"cannot save the state to {path}"), replacing(path) as draft:
        try:
            save_file(tensors, draft, metadata=described)
        except SafetensorError as error:
            raise SessionError(f"cannot save the state to {path}: {error}") from error


def load(path: Path, max_bytes: int | None = None) -> SavedState:
    """Read a state.

    Args:
        path: The file.
        max_bytes: A larger file is refused before it is read; None for no limit.

    Raises:
        DamagedError: If the file is not what `save` has written: put it aside.
        SessionError: If it cannot be read, or is not there.
    """
    with told(f"cannot read the state {path}"), path.open("rb") as file:
        num_bytes = file.seek(0, 2)
    if max_bytes is not None and num_bytes > max_bytes:
        raise DamagedError(f"{path} has {num_bytes:,} bytes, expected at most {max_bytes:,}")
    described, tensors = _read(path)
    if described.get("format") != FORMAT:
        raise DamagedError(f"{path} is not a saved state of streamchat")
    version = described.get("version")
    if version != str(VERSION):
        raise DamagedError(
            f"{path} has format {version}, this version of streamchat reads {VERSION}"
        )
    checksum = described.pop("checksum", None)
    if checksum != _checksum(described, tensors):
        raise DamagedError(f"{path} is damaged: its checksum does not match")
    return SavedState(json.loads(described["fingerprint"]), json.loads(described["meta"]), tensors)


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """In what two fingerprints differ, in words; empty if the state can be continued exactly."""
    names = dict.fromkeys((*current, *saved))
    return [
        f"{name} was {saved.get(name)}, is {current.get(name)}"
        for name in names
        if saved.get(name) != current.get(name)
    ]


def _read(path: Path) -> tuple[dict[str, str], dict[str, "Tensor"]]:
    """What a file describes, and copies of its tensors: the file itself is let go."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return dict(file.metadata() or {}), tensors
    except Exception as error:  # the reader raises whatever a broken file makes it stumble on
        raise DamagedError(f"{path} is damaged: {error}") from error


def _plain(tensors: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
    """On the CPU, contiguous, and each with a storage of its own, as the file wants them."""
    plain: dict[str, Tensor] = {}
    seen = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes or storage.data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(storage.data_ptr())
        plain[name] = tensor
    return plain


def _checksum(described: Mapping[str, str], tensors: Mapping[str, "Tensor"]) -> str:
    """BLAKE2b over what a file describes and over the bytes of its tensors."""
    import torch

    names = sorted(tensors)
    shapes = [[name, str(tensors[name].dtype), list(tensors[name].shape)] for name in names]
    digest = hashlib.blake2b(json.dumps([sorted(described.items()), shapes]).encode())
    for name in names:
        # numpy shares the memory; the digest lets other threads run meanwhile.
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
