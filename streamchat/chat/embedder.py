"""The model that finds by meaning: static embeddings, which `model2vec` reads.

It is an optional extra, imported when a model is loaded. Chosen for its size: a vector is looked up
for each token and averaged, in numpy, so it takes no time or memory from the model that talks.
"""

import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from streamchat.errors import ModelError, UsageError

if TYPE_CHECKING:
    from model2vec import StaticModel

LIBRARY = "model2vec"


@dataclass(frozen=True, slots=True)
class StaticEmbedder:
    """An `Embedder` of the store.

    Attributes:
        fingerprint: Digest of its vectors and its tokenizer.
    """

    fingerprint: str
    _model: "StaticModel"

    def embed(self, texts: Sequence[str]) -> NDArray[Any]:
        """Vectors of some texts, shape [len(texts), dim]; zero for one without known words."""
        # Its own processes would each load the model again.
        vectors: NDArray[Any] = self._model.encode(list(texts), use_multiprocessing=False)
        return vectors


def check_library() -> None:
    """Say what is missing, before anything is loaded.

    Raises:
        UsageError: If the extra is not installed.
    """
    if importlib.util.find_spec(LIBRARY) is None:
        raise UsageError(
            f"--recall-model needs {LIBRARY}: pip install 'streamchat-cli[embeddings]'"
        )


def load_embedder(name: str) -> StaticEmbedder:
    """Load a model from a folder, or by its name on the Hub.

    Raises:
        UsageError: If the extra is not installed.
        ModelError: If it cannot be loaded.
    """
    check_library()
    from model2vec import StaticModel

    try:
        model = StaticModel.from_pretrained(name, force_download=False)
        digest = hashlib.blake2b(model.embedding.tobytes(), digest_size=16)
        digest.update(model.tokenizer.to_str().encode())
        return StaticEmbedder(digest.hexdigest(), model)
    except Exception as error:  # whatever the files or the network make it stumble on
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"cannot load the recall model {name}: {reason}") from error
