"""The tokenizer of a model, made to say what SentencePiece says and held against the embedding.

Read before the weights: a tokenizer that does not belong to its model is refused at once, and not
in the middle of a stream.
"""

from pathlib import Path
from typing import Any

import transformers
from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, decoders, normalizers
from transformers import AutoTokenizer

from streamchat.errors import ModelError
from streamchat.model.plan import Plan, Source, guarded
from streamchat.model.tokenizer import Tokenizer

SENTENCEPIECE_FILE = "tokenizer.model"
"""What Llama's, Mistral's and Gemma's kind call it; other kinds, which add no BOS, do not."""

SPACE = "\u2581"
"""SentencePiece's sign for it."""

PROBE = " a  line"
"""Encoded alike only where the same spaces are put before a text, also before such a one."""


def load_tokenizer(plan: Plan) -> Tokenizer:
    """Read a model's tokenizer.

    Raises:
        ModelError: If there is none, or it is not that of this model.
    """
    source, options = plan.source, {"trust_remote_code": plan.trust_remote_code}
    inner = guarded(source, AutoTokenizer.from_pretrained, source.path, **options)
    if file := _sentencepiece_file(inner):
        _complete(source, inner, file, plan.config)
    num_ids = plan.config.vocab_size
    _check_embedding(source, inner, num_ids)
    tokenizer = Tokenizer(inner, num_ids)
    tokenizer.check_ids(tokenizer.bos_ids(), "its tokenizer begins a text with")
    return tokenizer


def unnamed_ids(tokenizer: Tokenizer, num_ids: int) -> frozenset[int]:
    """Ids without a token: rows that pad an embedding, which no text has trained.

    Args:
        tokenizer: The model's.
        num_ids: Rows of its embedding.
    """
    return frozenset(range(num_ids)).difference(tokenizer.inner.get_vocab().values())


def _sentencepiece_file(inner: Any) -> Path | None:
    """The file that a tokenizer was made from, if there was nothing else."""
    name = getattr(inner, "vocab_file", None)
    if not name or Path(name).name != SENTENCEPIECE_FILE:
        return None
    file = Path(name)
    return None if file.with_name("tokenizer.json").is_file() else file


def _complete(source: Source, inner: Any, file: Path, config: Any) -> None:
    """Let a tokenizer say what SentencePiece itself makes of its file, and begin with BOS.

    transformers adds BOS only where a tokenizer_config.json asks for it. Before 5.0 it was added
    unless one forbade it, and models whose folders say nothing were trained and used that way;
    GGUF files are still read by that rule. It is taken where the file and config.json agree on its
    id.
    """
    reference = SentencePieceProcessor(model_file=str(file))
    if reference.decode(reference.encode(PROBE)) == PROBE:  # it keeps all spaces, as Llama's does
        if not _agree(inner, reference):
            _read_spaces_as(inner, reference)
        if not _agree(inner, reference):
            raise ModelError(
                f"cannot load model '{source.name}': transformers {transformers.__version__} reads "
                f"its {file.name} otherwise than SentencePiece does; add a tokenizer.json"
            )
    says_nothing = "add_bos_token" not in inner.init_kwargs
    bos = reference.bos_id()
    if says_nothing and bos >= 0 and bos == config.bos_token_id == inner.bos_token_id:
        inner.add_bos_token = True


def _agree(inner: Any, reference: SentencePieceProcessor) -> bool:
    ids: list[int] = inner.encode(PROBE, add_special_tokens=False)
    return bool(ids == reference.encode(PROBE) and inner.decode(ids) == PROBE)


def _read_spaces_as(inner: Any, reference: SentencePieceProcessor) -> None:
    """Put a space before each text where SentencePiece does.

    transformers before 5.24 forgets it, and its LlamaTokenizer where the text begins with one.
    """
    back: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    signs: list[Any] = [normalizers.Replace(" ", SPACE)]
    if reference.encode_as_pieces("a")[0].startswith(SPACE):
        back.append(decoders.Strip(" ", 1, 0))
        signs.insert(0, normalizers.Prepend(SPACE))
    backend = inner.backend_tokenizer
    backend.normalizer = normalizers.Sequence(signs)
    backend.pre_tokenizer = None
    backend.decoder = decoders.Sequence(back)


def _check_embedding(source: Source, inner: Any, num_ids: int) -> None:
    """Refuse a tokenizer with words that the model has no embedding for.

    Tokens that were added to it later are another matter: they may stand for what this model does
    not take, such as images. Written in a text, they stay text.
    """
    vocab: dict[str, int] = inner.get_vocab()
    added = getattr(inner, "added_tokens_decoder", {})
    largest = max((i for i in vocab.values() if i not in added), default=0)
    if largest >= num_ids:
        raise ModelError(
            f"model '{source.name}' and its tokenizer do not belong together: the tokenizer has "
            f"ids up to {largest:,}, the model's embedding {num_ids:,} rows"
        )
    foreign = [str(token) for i, token in added.items() if i >= num_ids and not token.special]
    # Special tokens are split when a text is encoded.
    inner.add_tokens([AddedToken(token, special=True) for token in foreign], special_tokens=True)
