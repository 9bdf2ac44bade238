"""Convert a .gguf file once into a folder that loads in a second.

transformers can read GGUF files, but it takes many times as long as reading safetensors. The folder
holds the dequantized weights in float32, so that nothing is lost between the two.
"""

import contextlib
import hashlib
import io
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from filelock import FileLock
from gguf import GGUFReader, Keys
from safetensors import SafetensorError
from safetensors.torch import save_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from streamchat.errors import ModelError, StreamchatError
from streamchat.model.families import check_config
from streamchat.model.memory import gigabytes, passing_bytes

Progress = Callable[[str], None]

FORMAT = "v1"
"""Part of each converted folder's name: a change of format makes a new folder."""


def converted_folder(gguf: Path, models_folder: Path) -> Path:
    """Where the conversion of `gguf` lies: named for path, size and time of the file."""
    stat = gguf.stat()
    key = f"{gguf.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    digest = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:12]
    return models_folder / f"{gguf.stem}-{digest}-{FORMAT}"


def convert(gguf: Path, target: Path, progress: Progress) -> Path:
    """Convert `gguf` to the folder `target`, unless it is there already.

    Atomic: the folder appears whole or not at all. Of two processes, one converts and the other
    waits for it.

    Raises:
        ModelError: If the file cannot be read or the folder cannot be written.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not target.is_dir():
                check_expanded(gguf)
                progress(f"converting {gguf.name} (once)")
                _convert_locked(gguf, target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        text = f"cannot write the converted model to {target.parent}: {reason}"
        raise ModelError(text) from error
    return target


def check_expanded(gguf: Path) -> None:
    """Refuse a file whose float32 weights do not fit into memory, by its list of tensors.

    Raises:
        ModelError: With both sizes.
    """
    try:
        num_weights = sum(int(tensor.n_elements) for tensor in GGUFReader(gguf).tensors)
    except Exception:  # whatever a broken file makes it stumble on: the conversion will say so
        return
    needed, free = num_weights * torch.float32.itemsize, passing_bytes()
    if needed > free:
        raise ModelError(
            f"{gguf.name} ({gigabytes(gguf.stat().st_size)}) is expanded to {gigabytes(needed)} "
            f"of float32 weights, once, and {gigabytes(free)} of memory are free; choose the model "
            "as a folder or from the Hub with --dtype bfloat16, or a smaller model"
        )


def _convert_locked(gguf: Path, target: Path) -> None:
    work = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        write_folder(gguf, work)
        work.replace(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def write_folder(gguf: Path, folder: Path) -> None:
    """Write configuration, tokenizer and float32 weights of `gguf` into an existing folder."""
    try:
        source = {"gguf_file": gguf.name, "local_files_only": True}
        check_config(AutoConfig.from_pretrained(gguf.parent, **source))
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        # Older releases of transformers take Llama's begin token for its end token.
        end = GGUFReader(gguf).get_field(Keys.Tokenizer.EOS_ID)
        if end is not None:
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(int(end.contents()))
        # transformers draws a bar of its own here, and offers no way to turn it off.
        with contextlib.redirect_stderr(io.StringIO()):
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent, dtype=torch.float32, trust_remote_code=False, **source
            )
    except (OSError, StreamchatError):
        raise
    except Exception as error:  # the readers raise whatever a broken file makes them stumble on
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ModelError(f"cannot read {gguf}: {reason}") from error
    # The weights are plain float32 now; without this the loader would look for the .gguf again.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer.save_pretrained(folder)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
