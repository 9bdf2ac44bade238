"""Write docs/models.md, and the sentence on supported families in the README, from the code.

    python docs/models.py            # write
    python docs/models.py --check    # say what is out of date, and exit with 1 if anything is

Families come from `streamchat/model/families.py`, their names from the rows of `tests/families.py`,
and the refusals from the configurations of `tests/test_families.py`. Needs the `test` extra.
"""

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import pages
import transformers

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent / "tests"))

from families import ROWS, family_config  # noqa: E402
from test_families import REFUSED  # noqa: E402

from streamchat.errors import UnsupportedModelError  # noqa: E402
from streamchat.model.families import (  # noqa: E402
    FAMILIES,
    ROPE_TYPES,
    SOFTMAX_FIELD,
    Family,
    check_config,
    describe_positions,
    has_alibi,
)
from streamchat.model.wrapped import WRAPPED  # noqa: E402

transformers.logging.set_verbosity_error()

PAGE, README = FOLDER / "models.md", FOLDER.parent / "README.md"
BEGIN, END = "<!-- supported -->\n", "<!-- end -->\n"


def page() -> str:
    """The text of docs/models.md."""
    variants = variants_by_family()
    handling = sorted({described(c)[1] for configs in variants.values() for c in configs})
    return "\n".join(
        [
            "# Models",
            "",
            "Made by `python docs/models.py` from `streamchat/model/families.py` and its tests.",
            "",
            f"## {len(variants)} families that are streamed",
            "",
            "Each runs through the same matrix of tests with a tiny random model",
            "(`tests/test_matrix.py`), and each model through a self-check whenever it is loaded.",
            f"RoPE scalings: {', '.join(ROPE_TYPES)}.",
            "",
            "What is done for their positions:",
            "",
            *(f"* {sentence[0].upper()}{sentence[1:]}." for sentence in handling),
            "",
            "| family | `model_type` | positions | in another way than Llama |",
            "| --- | --- | --- | --- |",
            *(
                f"| {type(configs[0]).__name__.removesuffix('Config')} | `{family}` "
                f"| {' or '.join(map(positions, configs))} | {differences(family)} |"
                for family, configs in variants.items()
            ),
            "",
            "## Trained with another softmax",
            "",
            f"`{SOFTMAX_FIELD}` in a model's config.json says which softmax it was trained",
            "with, if that is not its family's:",
            "",
            "* `off_by_one`: 1 is added to the denominator (softmax-off-by-one; the zero sink",
            "  of StreamingLLM).",
            "* `learned`: exp(s) is added, with an s for each head, as in GPT-OSS: a parameter",
            "  `sinks` of shape (num_heads,) in each attention module.",
            "",
            "The model then runs as it was trained, streamed or not. In a prepared model",
            "transformers' own path has the term too, so one can be trained there",
            "(`benchmarks/pretrain_sinks.py` does); for a learned one,",
            "`streamchat.model.softmax.model_class(config)` makes a class that has `sinks`. All",
            "families can, but for these, which know only their own:",
            f"{', '.join(f'`{family}`' for family in sorted(only_their_own()))}.",
            "",
            "## What is refused",
            "",
            "By name and with the reason, before any weights are read. These are examples: what is",
            "not in the table above is refused.",
            "",
            "| configuration | reason |",
            "| --- | --- |",
            *(f"| {what} | {reason} |" for what, reason in refusals()),
            "",
        ]
    )


def only_their_own() -> set[str]:
    """Families whose softmax no configuration may choose."""
    return {*WRAPPED, *(name for name, family in FAMILIES.items() if family.has_sink_logits)}


def variants_by_family() -> dict[str, list[Any]]:
    """By `model_type` the configurations that differ in their positions, mostly one."""
    found: dict[str, list[Any]] = {}
    for name in sorted(ROWS):
        family, variant, _ = f"{name} ".partition(" (")
        config = family_config(name) if variant else type(family_config(name))()
        configs = found.setdefault(family.strip(), [])
        if positions(config) not in map(positions, configs):
            configs.append(config)
    return found


def described(config: Any) -> tuple[str, str]:
    """What kind of positions a family has, by its own defaults, and what is done for them."""
    kind, _, done = describe_positions(config).partition("; ")
    return re.sub(r", theta [\d,]*\d| on \d+ heads", "", kind), done


def positions(config: Any) -> str:
    """In a cell of the table."""
    text, _ = described(config)
    share = rotary_share(config)
    return text if share in (0, 1) else f"{text}, on {share:.0%} of a head"


def rotary_share(config: Any) -> float:
    """How much of a head is turned."""
    if has_alibi(config):
        return 0.0
    dim = getattr(config, "rotary_dim", None)
    if dim:
        return float(dim * config.num_attention_heads / config.hidden_size)
    rope = getattr(config, "rope_parameters", None) or {}
    return float(rope.get("partial_rotary_factor", 1))


def differences(name: str) -> str:
    """What `Family` says of a family, in the words of its docstring."""
    family, words = FAMILIES[name], attribute_words()
    differing = [
        words[field.name]
        for field in dataclasses.fields(Family)
        if getattr(family, field.name) != field.default
    ]
    return " ".join(differing).replace("|", "or")


def attribute_words() -> dict[str, str]:
    """What the docstring of `Family` says of each field."""
    section = (Family.__doc__ or "").split("Attributes:")[1]
    found = re.findall(r"^ {8}(\w+): (.+(?:\n {12}.+)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def refusals() -> list[tuple[str, str]]:
    """Configurations that are refused, and why, supported families last."""
    found = []
    for prefix, (fields, _) in REFUSED.items():
        config = getattr(transformers, f"{prefix}Config")(**fields)
        try:
            check_config(config)
        except UnsupportedModelError as error:
            reason = str(error).split(" is refused: ", 1)[1].split(" (supported: ")[0]
        else:
            raise SystemExit(f"{prefix} is not refused any more")
        is_supported = config.model_type in FAMILIES
        settings = ", ".join(f"`{name}={value}`" for name, value in fields.items())
        what = f"`{config.model_type}`" + (f" with {settings}" if is_supported else "")
        found.append((is_supported, what, reason))
    return [(what, reason) for _, what, reason in sorted(found)]


def readme(text: str) -> str:
    """The README with its sentence on supported families."""
    before, rest = text.split(BEGIN)
    after = rest.split(END, 1)[1]
    sentence = (
        f"Supported today: [{len(FAMILIES)} model families](docs/models.md), by transformers' own\n"
        f"code, with ALiBi or with RoPE, as it is or scaled ({', '.join(ROPE_TYPES[1:])}).\n"
        "Others are refused by name, with the reason.\n"
    )
    return f"{before}{BEGIN}{sentence}{END}{after}"


def wanted() -> dict[Path, str]:
    """What the files should hold."""
    return {PAGE: page(), README: readme(README.read_text(encoding="utf-8"))}


def main() -> None:
    pages.run(__file__, __doc__, wanted)


if __name__ == "__main__":
    main()
