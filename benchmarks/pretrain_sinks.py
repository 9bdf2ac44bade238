"""Does a model need sinks if it is trained with one? Table 3 of StreamingLLM, in small.

    python benchmarks/pretrain_sinks.py TEXT.txt [MORE.txt ...] [--plot sinks.svg]

Three models are trained on the same samples, from the same initial weights, with the same budget:

* vanilla: as usual;
* zero sink: softmax-off-by-one, a key of zeros that every query sees;
* learnable sink: every sample begins with a token made for that.

Each is saved as a model folder, and streamed from there through `streamchat` over text that it was
not trained on, with 0, 1, 2 and 4 sinks in a cache as large as the samples (the learnable sink is
fed once, at the start). Perplexities are of the tokens after the cache has filled. The share of the
attention that goes to the first token is that of the queries in the second half of a sample.

Nothing is fetched: the tokenizer is trained on the text too. A model that is finished is kept, and
not trained again by a second run with the same settings (arXiv:2309.17453, section 3.3).
"""

import argparse
import hashlib
import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import (
    RESULTS,
    ROOT,
    SEED,
    environment,
    main_dtype,
    markdown,
    physical_cores,
    read_csv,
    say,
    write_csv,
)

SINKS = (0, 1, 2, 4)
HEADS = 4
HELD_OUT = 0.05
"""Share of the text, at its end, that no model is trained on."""

SHARE_SAMPLES = 16
PEAK_RATE, LAST_RATE = 2e-3, 2e-4
SINK, SINK_ID = "<sink>", 0
"""A trainer of tokenizers puts special tokens first."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to train.

    Attributes:
        name: What the paper calls it.
        softmax: `streamchat_softmax` of its configuration.
        has_token: Whether its samples begin with the sink token.
    """

    name: str
    softmax: str = "standard"
    has_token: bool = False


VARIANTS = (
    Variant("vanilla"),
    Variant("zero sink", softmax="off_by_one"),
    Variant("learnable sink", has_token=True),
)


def main(arguments: Sequence[str] | None = None) -> None:
    import torch

    args = parse(arguments)
    torch.set_num_threads(args.threads)
    text = "\n".join(file.read_text(encoding="utf-8") for file in args.files)
    cut = int(len(text) * (1 - HELD_OUT))
    settings = settings_of(args, text[:cut])
    args.folder.mkdir(parents=True, exist_ok=True)
    tokenizer = trained_tokenizer(args.folder / f"tokenizer-{digest(settings)}", text[:cut], args)
    train_ids = tokenizer.encode(text[:cut])
    held_out = tokenizer.encode(text[cut:])[: args.tokens]
    if len(train_ids) <= args.context or len(held_out) <= 2 * args.context:
        raise SystemExit(
            f"the text is too short: {len(train_ids)} tokens to train on and {len(held_out)} held "
            f"out, for samples of {args.context}"
        )
    say(
        f"{len(train_ids):,} tokens to train on, {len(held_out):,} held out; entropy of single "
        f"tokens {unigram_entropy(train_ids):.2f} nats"
    )
    rows: list[dict[str, object]] = []
    for variant in VARIANTS:
        folder = args.folder / f"{variant.name.replace(' ', '-')}-{digest(settings)}"
        if not folder.is_dir():
            train(variant, folder, tokenizer, torch.tensor(train_ids), args)
        rows += results(variant, folder, held_out, args)
    write_csv(args.output, rows)
    shown = read_csv(args.output)
    print(table(shown))
    if args.plot:
        plot(shown, args.plot)


def settings_of(args: argparse.Namespace, text: str) -> dict[str, object]:
    """All that a trained model depends on."""
    names = ("steps", "batch", "context", "layers", "hidden", "vocab", "seed", "dtype")
    text_sum = hashlib.sha256(text.encode()).hexdigest()
    return {**{name: getattr(args, name) for name in names}, "text": text_sum}


def digest(settings: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]


# Training


def trained_tokenizer(folder: Path, text: str, args: argparse.Namespace) -> Any:
    """A byte-level BPE of the text; the one that is kept, if there is one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if not folder.is_dir():
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=args.vocab,
            special_tokens=[SINK],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(text.splitlines(keepends=True), trainer)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
        tokenizer.add_special_tokens({"additional_special_tokens": [SINK]})
        keep(folder, tokenizer.save_pretrained)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def keep(folder: Path, write: Any) -> None:
    """Fill a folder, all or nothing."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        made = Path(work) / folder.name
        write(made)
        made.rename(folder)


def new_model(variant: Variant, vocab_size: int, args: argparse.Namespace) -> Any:
    """A tiny Llama, with the same initial weights for all variants."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import streamchat

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=args.hidden,
        intermediate_size=16 * round(args.hidden / 6),  # 8 / 3 of the hidden size
        num_hidden_layers=args.layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=args.context + variant.has_token,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        streamchat_softmax=variant.softmax,
    )
    torch.manual_seed(args.seed)
    # Prepared, it runs its own path as its configuration says: with softmax-off-by-one, too.
    return streamchat.prepare(LlamaForCausalLM(config))


def train(
    variant: Variant, folder: Path, tokenizer: Any, ids: Any, args: argparse.Namespace
) -> None:
    """Train a model, and keep it with its losses."""
    import torch

    model = new_model(variant, len(tokenizer), args)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), PEAK_RATE, (0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: rate(step, args.steps) / PEAK_RATE
    )
    generator = torch.Generator().manual_seed(args.seed)
    starts = torch.randint(len(ids) - args.context, (args.steps, args.batch), generator=generator)
    columns = torch.arange(args.context)
    losses = []
    started = time.perf_counter()
    for step, first in enumerate(starts, start=1):
        batch, labels = sample(ids[first[:, None] + columns], variant)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bfloat16"):
            loss = model(batch, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 100 == 0 or step == args.steps:
            speed = step * args.batch * args.context / (time.perf_counter() - started)
            recent = mean(losses[-100:])
            say(f"{variant.name}: step {step:,} of {args.steps:,}, {recent:.3f}, {speed:,.0f} t/s")
    facts = {"losses": losses, "seconds": time.perf_counter() - started, "threads": args.threads}

    def write(target: Path) -> None:
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        (target / "training.json").write_text(json.dumps(facts), encoding="utf-8")

    keep(folder, write)


def rate(step: int, steps: int) -> float:
    """The learning rate: up within a twentieth of the steps, then down along a cosine."""
    warm = max(1, steps // 20)
    if step < warm:
        return PEAK_RATE * (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return LAST_RATE + (PEAK_RATE - LAST_RATE) * (1 + math.cos(math.pi * done)) / 2


def sample(texts: Any, variant: Variant) -> tuple[Any, Any]:
    """Ids and labels, with the sink in front where there is one.

    All variants learn from the same tokens: the first one of a text is never asked for.
    """
    from torch.nn import functional as F

    if not variant.has_token:
        return texts, texts
    labels = texts.clone()
    labels[:, 0] = -100
    return F.pad(texts, (1, 0), value=SINK_ID), F.pad(labels, (1, 0), value=-100)


# What was learnt


def results(
    variant: Variant, folder: Path, ids: list[int], args: argparse.Namespace
) -> list[dict[str, object]]:
    """The rows of a variant."""
    import streamchat

    # The weights as they were trained, on the device that they were trained on.
    loaded = streamchat.load(str(folder), device="cpu", quantize="none")
    facts = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    losses = facts["losses"]
    common = {
        "steps": args.steps,
        "batch": args.batch,
        "context": args.context,
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
        "train_dtype": args.dtype,
        "train_threads": facts["threads"],
        **environment(threads=args.threads, dtype=main_dtype(loaded.model)),
        "seed": args.seed,
    }

    def row(measure: str, value: float, **where: int) -> dict[str, object]:
        places = {name: where.get(name, "") for name in ("sinks", "window", "layer", "tokens")}
        return {"variant": variant.name, "measure": measure, "value": value, **places, **common}

    rows = [
        row("training loss", mean(losses[-max(1, len(losses) // 20) :])),
        row("training minutes", facts["seconds"] / 60),
    ]
    for sinks in SINKS:
        window = args.context - sinks
        perplexity, count = streamed(loaded, variant, ids, sinks, window)
        say(f"{variant.name}: perplexity {perplexity:.2f} with {sinks} + {window}")
        rows.append(row("perplexity", perplexity, sinks=sinks, window=window, tokens=count))
    for measure, shares in attention_shares(loaded, variant, ids, args.context).items():
        rows += [row(measure, share, layer=layer) for layer, share in enumerate(shares)]
    return rows


def streamed(
    loaded: Any, variant: Variant, ids: list[int], sinks: int, window: int
) -> tuple[float, int]:
    """Perplexity of the tokens after the cache has filled, and how many these are."""
    import streamchat

    config = streamchat.CacheConfig(sink_size=sinks, window_size=window)
    stream = streamchat.Stream(loaded, config)
    if variant.has_token:
        stream.feed([SINK_ID])
    scores = stream.score(ids)[sinks + window :]
    return math.exp(mean(scores)), len(scores)


def attention_shares(
    loaded: Any, variant: Variant, ids: list[int], context: int
) -> dict[str, list[float]]:
    """By layer, what queries in the second half of a sample give to its first token.

    For the zero sink also what they give to nothing.
    """
    import torch
    from transformers.models.llama.modeling_llama import eager_attention_forward

    from streamchat.model.prepare import EAGER_NAME
    from streamchat.model.softmax import with_extra_term

    model = loaded.model
    is_off_by_one = variant.softmax == "off_by_one"
    attention: Any = eager_attention_forward
    if is_off_by_one:
        attention = with_extra_term(attention, is_learned=False)
    first, nothing = ([0.0] * model.config.num_hidden_layers for _ in range(2))

    def watched(module: Any, *args: Any, **kwargs: Any) -> tuple[Any, None]:
        out, weights = attention(module, *args, **kwargs)
        late = weights[:, :, context // 2 :]
        first[module.layer_idx] = float(late[..., 0].mean())
        nothing[module.layer_idx] = float(late[..., -1].mean())
        return out, None

    samples = min(SHARE_SAMPLES, len(ids) // context)
    texts = torch.tensor(ids[: samples * context]).view(samples, context)
    if variant.has_token:
        texts = torch.nn.functional.pad(texts, (1, 0), value=SINK_ID)
    model.set_attn_implementation(EAGER_NAME)
    model.streamchat_binding.stock = watched
    with torch.no_grad():
        model(texts, use_cache=False)
    shares = {"share of first token": first}
    return {**shares, "share of zero key": nothing} if is_off_by_one else shares


def unigram_entropy(ids: Sequence[int]) -> float:
    """Nats per token of a model that knows how frequent tokens are, and nothing else."""
    import torch

    counts = torch.bincount(torch.tensor(ids)).double()
    return float(torch.special.entr(counts / counts.sum()).sum())


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


# What is shown


def table(rows: Sequence[dict[str, str]]) -> str:
    """Markdown: a line a variant."""
    perplexities = [row for row in rows if row["measure"] == "perplexity"]
    sizes = list(dict.fromkeys(f"{row['sinks']} + {row['window']}" for row in perplexities))
    lines = []
    for name in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == name]
        values = {f"{row['sinks']} + {row['window']}": row["value"] for row in own}
        shares = of_measure(own, "share of first token")
        lines.append(
            [
                name,
                f"{of_measure(own, 'training loss')[0]:.3f}",
                *(f"{float(values[size]):,.2f}" for size in sizes),
                f"{mean(shares):.1%}",
                f"{max(shares):.1%}",
            ]
        )
    header = ["trained with", "loss", *sizes, "share of first token", "highest layer"]
    return markdown(header, lines)


def of_measure(rows: Sequence[dict[str, str]], measure: str) -> list[float]:
    return [float(row["value"]) for row in rows if row["measure"] == measure]


def plot(rows: Sequence[dict[str, str]], path: Path) -> None:
    """Perplexities, and shares of attention by layer, beside each other."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install 'streamchat-cli[plot]'") from None

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = list(dict.fromkeys(row["variant"] for row in rows))
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        own = [row for row in rows if row["variant"] == name]
        perplexities = of_measure(own, "perplexity")
        places = [place + (index - (len(names) - 1) / 2) * width for place in range(len(SINKS))]
        left.bar(places, perplexities, width, label=name)
        right.plot(of_measure(own, "share of first token"), marker="o", label=name)
    if nothing := of_measure(rows, "share of zero key"):
        right.plot(nothing, "--", color="C1", label="zero sink: to its zero key")
    left.set(xlabel="sinks in a full cache", ylabel="perplexity")
    left.set_xticks(range(len(SINKS)), [str(sinks) for sinks in SINKS])
    right.set(xlabel="layer", ylabel="attention on the first token", ylim=(0, None))
    right.xaxis.get_major_locator().set_params(integer=True)
    left.legend()
    right.legend()
    # The same figures give the same file.
    with rc_context({"svg.hashsalt": "sinks", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    say(f"wrote {path}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="plain text in UTF-8")
    parser.add_argument("--steps", type=int, default=2000, help="the budget, of each model")
    parser.add_argument("--batch", type=int, default=8, help="samples a step")
    parser.add_argument("--context", type=int, default=256, help="tokens a sample, and cache size")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=2048, help="of the tokenizer")
    parser.add_argument("--tokens", type=int, default=16_384, help="held out, that are streamed")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of the products while training; float32 where a CPU has no bfloat16 of its own",
    )
    parser.add_argument("--folder", type=Path, default=ROOT / ".pretrained", help="of the models")
    parser.add_argument("--output", type=Path, default=RESULTS / "pretrain_sinks.csv")
    parser.add_argument("--plot", type=Path, help="also draw a picture (.svg, .png)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
