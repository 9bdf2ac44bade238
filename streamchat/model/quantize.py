"""Models whose weights are stored in 8 or 4 bits, quantized once and kept on disk.

Every linear layer and the token embedding is quantized, weights only; norms and biases stay as they
are. With 4 bits the embedding and the head keep 8: errors there touch every token at once.
"""

import contextlib
import hashlib
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import init_empty_weights
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GenerationConfig

from streamchat.model.softmax import model_class
from streamchat.ops.linear import CAN_COMPILE, MIN_TOKENS, linear
from streamchat.ops.quantization import GROUP, Quantized, dequantize, fits, quantize

Scheme = Literal["int8", "int4"]
BITS: dict[Scheme, int] = {"int8": 8, "int4": 4}

FORMAT = "q1"
"""Part of each quantized file's name: a change of format makes a new file."""

BLOCK_WEIGHTS = 1 << 22
"""Weights that are dequantized at once: bounds the temporary of a large head."""


class QuantizedLinear(nn.Module):
    """A linear layer with quantized weights.

    Args:
        weight: Its weights.
        bias: Shape (out_features,), or None.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, weight: Quantized, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("codes", weight.codes)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """`x` of shape (..., in_features) times the weights; shape (..., out_features)."""
        if x.device.type == "cpu" and x.dtype == torch.float32:
            num_tokens = x.numel() // x.shape[-1]
            if num_tokens < MIN_TOKENS and CAN_COMPILE:
                # Imported late: it takes a while, and only a CPU needs it.
                from streamchat.ops.compiled.matrix import matrix_times_rows

                return matrix_times_rows(self.codes, self.scales, x, self.bias)
        step = max(1, BLOCK_WEIGHTS // x.shape[-1])
        blocks = []
        for start in range(0, self.codes.shape[0], step):
            rows = slice(start, start + step)
            weight = dequantize(self.codes[rows], self.scales[rows], x.dtype)
            blocks.append(linear(x, weight, None if self.bias is None else self.bias[rows]))
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=-1)


class QuantizedEmbedding(nn.Module):
    """Token embeddings with quantized weights.

    Args:
        weight: Of shape (vocab_size, hidden_size).
        dtype: Of the embeddings it returns.
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, weight: Quantized, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("codes", weight.codes)
        self.register_buffer("scales", weight.scales)
        # Empty: a model has the dtype of its parameters, and may have no others; Llama 4 asks the
        # embedding for its device.
        self.weight = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Embeddings of `ids`, shape (..., hidden_size)."""
        return dequantize(self.codes[ids], self.scales[ids], self.weight.dtype)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a plain linear layer; routers of experts are built on it, and are not.

    Falcon has a class of its own, which computes the same.
    """
    return type(module) is nn.Linear or type(module).__name__ == "FalconLinear"


def why_not_quantized(model: Any, scheme: Scheme) -> str | None:
    """Why a model's weights cannot be stored in this way, in a line; None if they can."""
    for name, module in model.named_modules():
        if is_linear(module) and not fits(module.in_features, bits_of(name, scheme)):
            return f"{name} has {module.in_features} inputs, which cannot be cut into groups"
    if not fits(model.get_input_embeddings().embedding_dim, 8):
        return "its embeddings cannot be cut into groups"
    return None


def quantize_model(model: Any, scheme: Scheme) -> None:
    """Replace the linear layers and the embedding of a model by quantized ones, in place."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    table = quantize(embedding.weight.detach(), 8)
    is_tied = head is not None and head.weight is embedding.weight
    for name, module in list(model.named_modules()):
        if module is embedding:
            model.set_submodule(name, QuantizedEmbedding(table, model.dtype))
        elif is_linear(module):
            weight = (
                table
                if module is head and is_tied
                else quantize(module.weight.detach(), bits_of(name, scheme))
            )
            model.set_submodule(name, QuantizedLinear(weight, module.bias))


def bits_of(name: str, scheme: Scheme) -> int:
    """Bits of a linear layer's codes: the head keeps 8."""
    return 8 if name.endswith(("lm_head", "embed_out")) else BITS[scheme]


def quantized_file(folder: Path, source: str, revision: str | None, scheme: Scheme) -> Path | None:
    """Where the quantized weights of a model lie in `folder`; None if nothing tells its version.

    A local model is known by path, sizes and times of its weights, one of the Hub by its revision.
    """
    local = Path(source)
    if local.is_dir():
        weights = sorted(local.glob("*.safetensors*"))
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weights]
        key = f"{local.resolve()}\0{stats}"
    elif revision is not None:
        key = f"{source}\0{revision}"
    else:
        return None
    digest = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:12]
    return folder / f"{local.name}-{digest}-{scheme}-{FORMAT}.safetensors"


def save(model: Any, file: Path, source: str) -> None:
    """Write a quantized model's weights, all or nothing.

    What was kept of local models that are gone, or have changed, is removed.

    Args:
        model: The model.
        file: From `quantized_file`.
        source: The model's folder or Hub id.
    """
    folder = file.parent
    folder.mkdir(parents=True, exist_ok=True)
    own = str(Path(source).resolve()) if Path(source).is_dir() else ""
    with FileLock(folder / "quantized.lock"):
        for kept in folder.glob(f"*-{FORMAT}.safetensors"):
            owner = _owner(kept)
            has_changed = owner == own and _scheme(kept) == _scheme(file)
            if owner and (has_changed or not Path(owner).is_dir()):
                kept.unlink()
        with tempfile.TemporaryDirectory(dir=folder) as work:
            written = Path(work) / file.name
            tensors = {name: tensor.contiguous() for name, tensor in _distinct(model).items()}
            save_file(tensors, written, metadata={"format": "pt", "folder": own})
            written.replace(file)


def _scheme(file: Path) -> str:
    return file.stem.rsplit("-", 2)[1]


def _owner(file: Path) -> str:
    """Folder of the local model that a file was made from; empty for one of the Hub."""
    try:
        with safe_open(file, "pt") as opened:
            return str((opened.metadata() or {}).get("folder", ""))
    except (OSError, SafetensorError):
        return ""


def _distinct(model: Any) -> dict[str, Tensor]:
    """A model's weights, those that a tied head shares with the embedding once."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            tensors[name] = tensor
        seen.add(tensor.data_ptr())
    return tensors


def load_quantized(
    folder: str, config: Any, file: Path, dtype: torch.dtype, trust_remote_code: bool = False
) -> Any:
    """A model with the quantized weights of a file; None if the file is not whole.

    Args:
        folder: The model's folder or Hub id, for its generation configuration.
        config: The model's configuration.
        file: Written by `save`.
        dtype: Of activations, norms and biases.
        trust_remote_code: Allow code from the model's repository to run.
    """
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError):
        return None
    # Only the parameters, which the file replaces; RoPE's frequencies are made in here.
    with init_empty_weights(include_buffers=False):
        model = model_class(config).from_config(config, trust_remote_code=trust_remote_code)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    try:
        for name, module in list(model.named_modules()):
            if module is embedding:
                # Copied: one view of a mapped file would keep all of it in memory.
                shape = (module.num_embeddings, module.embedding_dim)
                table = Quantized(*(part.clone() for part in _take(tensors, name, shape)))
                model.set_submodule(name, QuantizedEmbedding(table, dtype))
            elif is_linear(module):
                # A head without weights of its own is tied to the embedding, which comes first.
                is_tied = module is head and f"{name}.codes" not in tensors
                shape = (module.out_features, module.in_features)
                weight = table if is_tied else _take(tensors, name, shape)
                has_bias = getattr(module, "bias", None) is not None
                bias = tensors.pop(f"{name}.bias") if has_bias else None
                model.set_submodule(name, QuantizedLinear(weight, bias))
        model.load_state_dict(tensors, strict=False, assign=True)
    except (KeyError, RuntimeError):  # a tensor is missing, or of another shape
        return None
    if any(tensor.device.type == "meta" for tensor in model.state_dict().values()):
        return None
    with contextlib.suppress(OSError):  # many models have none
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return to_dtype(model, dtype)


def _take(tensors: dict[str, Tensor], name: str, shape: tuple[int, int]) -> Quantized:
    """A matrix of this shape from a file.

    Raises:
        KeyError: If it is not there, or of another shape.
    """
    codes, scales = tensors.pop(f"{name}.codes"), tensors.pop(f"{name}.scales")
    rows, columns = shape
    halves = 1 if codes.dtype == torch.int8 else 2
    shapes = ((rows, columns // halves), (rows, columns // GROUP * halves))
    if (codes.shape, scales.shape) != shapes:
        raise KeyError(name)
    return Quantized(codes, scales)


def to_dtype(model: Any, dtype: torch.dtype) -> Any:
    """Copy what is not quantized to a dtype, in place; scales stay float16."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            copy = parameter.detach().to(dtype, copy=True)
            setattr(module, name, nn.Parameter(copy, requires_grad=False))
        if isinstance(module, QuantizedLinear) and module.bias is not None:
            module.bias = module.bias.to(dtype, copy=True)
    model.config.dtype = dtype
    return model


class FastLinear(nn.Linear):
    """A linear layer by `ops.linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """`x` of shape (..., in_features); shape (..., out_features)."""
        return linear(x, self.weight, self.bias)


def use_fast_linear(model: Any) -> None:
    """Let a model's linear layers compute by `ops.linear`."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FastLinear
