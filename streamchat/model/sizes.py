"""How many bytes a model's weights will take, without reading them.

A plain model is built without storage, from its configuration: that is what will be held, whatever
else its files hold (layers that are not loaded, experts one by one). Weights that come quantized
are as large as the tensors in the headers of their files.
"""

import contextlib
import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_safetensors_metadata
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from streamchat.model.quantize import BITS, Scheme, bits_of, is_linear, why_not_quantized
from streamchat.model.softmax import model_class
from streamchat.ops.quantization import bytes_per_weight


@dataclass(frozen=True, slots=True)
class Census:
    """A model's weights, counted by how they can be stored.

    Attributes:
        num_weights: All of them.
        num_linear: Those in linear layers that 4 bits are enough for.
        num_wide: Those that keep 8 bits in any scheme: the embedding and the head.
        schemes: What its rows can be cut into groups for.
    """

    num_weights: int
    num_linear: int
    num_wide: int
    schemes: frozenset[Scheme]

    def num_bytes(self, dtype: torch.dtype, scheme: Scheme | None) -> int:
        """Bytes of the weights, stored in a dtype or quantized."""
        if scheme is None:
            return self.num_weights * dtype.itemsize
        rest = self.num_weights - self.num_linear - self.num_wide
        return int(
            self.num_linear * bytes_per_weight(BITS[scheme])
            + self.num_wide * bytes_per_weight(8)
            + rest * dtype.itemsize
        )


def take_census(config: Any, *, trust_remote_code: bool = False) -> Census | None:
    """Count the weights of a model; None where it cannot be built from its configuration alone."""
    try:
        with torch.device("meta"):
            # Copied: building a model writes to its configuration.
            model = model_class(config).from_config(
                copy.deepcopy(config), trust_remote_code=trust_remote_code
            )
    except Exception:  # code of any kind runs here; what is wrong is told when the model is loaded
        return None
    embedding, counts, seen = model.get_input_embeddings(), {4: 0, 8: 0}, set()
    for name, module in model.named_modules():
        is_table = module is embedding
        if (is_table or is_linear(module)) and id(module.weight) not in seen:
            seen.add(id(module.weight))  # a tied head shares it
            counts[8 if is_table else bits_of(name, "int4")] += module.weight.numel()
    return Census(
        num_weights=sum(parameter.numel() for parameter in model.parameters()),
        num_linear=counts[4],
        num_wide=counts[8],
        schemes=frozenset(s for s in BITS if why_not_quantized(model, s) is None),
    )


def file_bytes(path: str, revision: str | None) -> int | None:
    """Bytes of the tensors in a model's safetensors files; None where nothing tells.

    Args:
        path: The model's folder or Hub id. Of a model of the Hub that is not here, the headers are
            asked for.
        revision: Of the Hub's model.
    """
    for name in (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME):
        with contextlib.suppress(Exception):  # not here, or broken: the loader will say so
            file = Path(cached_file(path, name, revision=revision, local_files_only=True))
            return _local_bytes(file)
    if Path(path).is_dir():
        return None
    with contextlib.suppress(Exception):  # no network, no such file, no safetensors
        files = get_safetensors_metadata(path, revision=revision).files_metadata.values()
        tensors = [info for file in files for info in file.tensors.values()]
        return sum(info.data_offsets[1] - info.data_offsets[0] for info in tensors)
    return None


def _local_bytes(file: Path) -> int:
    """From one file, or from the index of several."""
    if file.name == SAFE_WEIGHTS_NAME:
        return file.stat().st_size
    shards = set(json.loads(file.read_text(encoding="utf-8"))["weight_map"].values())
    return sum(file.with_name(shard).stat().st_size for shard in shards)
