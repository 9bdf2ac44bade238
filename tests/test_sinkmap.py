"""`bench --sink-map`: attention as transformers' eager path has it, norms and losses likewise."""

import csv
import io
import json
import math
import re
from dataclasses import replace

import pytest
import torch
from conftest import BYTE_VOCAB_SIZE, byte_tokenizer, random_ids, tiny_model
from families import ROWS, all_slowly, family_model
from oracles import assert_logits_equal
from rich.console import Console

from streamchat import CacheConfig, ConfigError, StateError, prepare
from streamchat.bench import sinkmap
from streamchat.bench.sinkmap import (
    NUM_FIRST,
    SINK_SIZES,
    WITH,
    WITHOUT,
    SinkMap,
    Sweep,
    attention_of_first,
    cache_size_for,
    layers_of,
    map_sinks,
    norms_by_position,
    verdict,
)
from streamchat.cache.recorded import RecordingCache
from streamchat.engine.stream import Stream
from streamchat.model.load import LoadedModel, Source
from streamchat.model.prepare import forward
from streamchat.model.tokenizer import Tokenizer
from streamchat.ui.heatmap import HeatRow, print_heat_map

LENGTH = 40

KINDS = (
    "llama",
    "cohere",  # pairs
    "gpt_neox",  # a part of each head
    "smollm3",  # layers without angles
    "gemma2",  # soft-capping, native windows
    "gemma3_text",  # other angles in layers with native windows
    "gpt_oss",  # learned sinks
    "ministral3",  # scaled queries
    "phi3",  # longrope
    "bloom",
    "falcon (rw)",
    "mpt",
)
"""One family of each kind of attention."""


def loaded_family(name):
    model = prepare(family_model(name))
    return LoadedModel(Source(name, name), model, Tokenizer(byte_tokenizer()), frozenset({2}))


# Attention


# transformers' eager Falcon adds ALiBi twice, in its mask and in its attention; sdpa once.
@pytest.mark.parametrize("name", [name for name in KINDS if name != "falcon (rw)"])
def test_attention_is_that_of_the_models_own_eager_path(name):
    """By layer, head and token: the mean over the newer half of the queries that see the first."""
    ids, own = random_ids(LENGTH), family_model(name)
    own.set_attn_implementation("eager")
    with torch.no_grad():
        weights = own(ids, output_attentions=True, use_cache=False).attentions
    found = attention_of_first(loaded_family(name), ids[0].tolist())
    assert len(found) == len(weights) == 2
    kinds = getattr(own.config, "layer_types", None) or ["full_attention"] * 2
    for layer, kind, expected in zip(found, kinds, weights, strict=True):
        is_local = kind == "sliding_attention"
        newer = slice(4, 8) if is_local else slice(LENGTH // 2, LENGTH)  # a native window of 8
        expected = expected[0, :, newer, : max(NUM_FIRST)].mean(dim=1)
        torch.testing.assert_close(torch.tensor(layer), expected, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_recording_changes_nothing(name):
    """The logits are the model's own; another prompt takes a reset."""
    ids, model = random_ids(LENGTH), loaded_family(name).model
    cache = RecordingCache(model.streamchat_binding.geometry, 4)
    got = forward(model, ids, cache, LENGTH)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    assert_logits_equal(got, expected, 3e-5)
    with pytest.raises(StateError, match="one prompt, whole"):
        forward(model, ids, cache)
    cache.reset()
    assert torch.equal(forward(model, ids, cache, LENGTH), got)


# Norms


@pytest.mark.parametrize("name", all_slowly(ROWS))
def test_norms_are_those_of_the_hidden_states(name):
    """Of every family, before anything has left: after each layer but the last, and in order."""
    ids, loaded = random_ids(LENGTH), loaded_family(name)
    with torch.no_grad():
        states = loaded.model(ids, output_hidden_states=True, use_cache=False).hidden_states
    hooks = [len(layer._forward_hooks) for layer in layers_of(loaded.model)]
    norms = norms_by_position(loaded, CacheConfig(window_size=LENGTH), ids[0].tolist())
    assert [len(layer) for layer in norms] == [LENGTH] * 2
    expected = states[1][0].norm(dim=-1)
    torch.testing.assert_close(torch.tensor(norms[0]), expected, atol=1e-3, rtol=1e-4)
    for index, layer in enumerate(layers_of(loaded.model)):
        owners = [m.layer_idx for m in layer.modules() if hasattr(m, "layer_idx")]
        assert set(owners) == {index}
    # Those that transformers sets for `output_hidden_states` stay, ours are gone.
    assert [len(layer._forward_hooks) for layer in layers_of(loaded.model)] == hooks


def test_norms_go_on_past_the_first_eviction(monkeypatch):
    """In one layer each token's is that of a plain pass over what it sees, however it is cut."""
    monkeypatch.setattr(sinkmap, "CHUNK_SIZE", 7)
    model, ids = tiny_model(), random_ids(LENGTH)
    loaded = LoadedModel(Source("tiny", "tiny"), model, Tokenizer(byte_tokenizer()), frozenset())
    config = CacheConfig(sink_size=2, window_size=10)
    (found,) = norms_by_position(loaded, config, ids[0].tolist())
    expected = []
    hook = model.base_model.layers[0].register_forward_hook(
        lambda _module, _args, out: expected.append(out[0, -1].norm().item())
    )
    with torch.no_grad():
        for end in range(1, LENGTH + 1):
            newest = ids[:, max(0, end - 10) : end]
            model(torch.cat((ids[:, : min(2, max(0, end - 10))], newest), dim=1), use_cache=False)
    hook.remove()
    assert found == pytest.approx(expected, rel=1e-4)


# All of it


def test_a_map_of_a_tiny_model(loaded, monkeypatch):
    """Perplexity is that of the stream's own losses with a full cache; no number is missing."""
    monkeypatch.setattr(sinkmap, "PROMPT_LENGTH", 64)
    ids = random_ids(200)[0].tolist()
    said = []
    found = map_sinks(loaded, ids, 40, said.append)
    assert [row.num_sinks for row in found.sweep] == list(SINK_SIZES)
    for row in found.sweep:
        config = CacheConfig(sink_size=row.num_sinks, window_size=40 - row.num_sinks)
        losses = Stream(loaded, config).score(ids)[40:]
        assert row.num_sinks + row.num_newest == 40
        assert row.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)
    assert found.prompt_length == 64
    assert found.alike == pytest.approx(sum(1 / n for n in range(33, 65)) / 32)
    figures = found.figures()
    by_measure = {}
    for figure in figures:
        by_measure.setdefault(figure.measure, []).append(figure)
    assert {name: len(rows) for name, rows in by_measure.items()} == {
        "attention": 4 * 2 * 4,
        "norm of first": 2,
        "norm before": 2,
        "norm without sinks": 2,
        "norm with sinks": 2,
        "perplexity": 5,
    }
    shares = [figure.value for figure in by_measure["attention"] if figure.num_first == 4]
    assert sum(shares) / len(shares) == pytest.approx(found.share(4))
    assert said[0] == "measuring what the first tokens draw"


@pytest.mark.parametrize("name", ["bloom", "mpt", "gemma2", "gpt_oss"])
def test_families_with_biases_and_native_windows(name):
    """Their maps are made as well: numbers everywhere."""
    found = map_sinks(loaded_family(name), random_ids(160)[0].tolist(), 40)
    assert all(math.isfinite(figure.value) for figure in found.figures())
    assert all(0 <= share <= 1 + 1e-6 for layer in found.shares(8) for share in layer)


def a_map(perplexities, share=0.25):
    """A map of one layer and two heads, whose first token draws this much more than alike."""
    sweep = [
        Sweep(num_sinks=size, num_newest=100 - size, perplexity=value)
        for size, value in zip(SINK_SIZES, perplexities, strict=True)
    ]
    curves = {WITHOUT: [[50.0] + [10.0] * 99 + [12.0] * 100], WITH: [[50.0] + [10.0] * 199]}
    return SinkMap(
        prompt_length=400,
        drawn=[[[share, 0.0, 0, 0, 0, 0, 0, 0], [share, 0.05, 0, 0, 0, 0, 0, 0]]],
        alike=0.003,
        cache_size=100,
        curves=curves,
        sweep=sweep,
    )


@pytest.mark.parametrize(
    ("perplexities", "needed"),
    [
        # Xiao et al. 2023, table 2: Falcon-7B, MPT-7B, Pythia-12B and Llama-2-7B.
        ((17.90, 12.12, 12.12, 12.12, 12.12), 1),
        ((460.29, 14.99, 15.00, 14.99, 14.98), 1),
        ((21.62, 11.95, 12.09, 12.09, 12.02), 1),
        ((3359.95, 11.88, 10.51, 9.59, 9.54), 4),
        ((12.1, 12.0, 12.0, 12.0, 12.0), 0),
    ],
)
def test_how_many_sinks_a_model_needs(perplexities, needed):
    assert a_map(perplexities).num_needed() == needed


def test_what_a_map_says():
    """With sinks and without: shares, perplexities and the norm that moved, in a line."""
    said = verdict("Llama-2-7B", a_map((3359.95, 11.88, 10.51, 9.59, 9.54)))
    assert said.startswith("Llama-2-7B has sinks: the first 4 of 400 tokens draw 28% of the")
    assert "(1.2% if all drew alike), the first alone 25%; it needs 4 to come within 5%" in said
    assert "3,359.95 without, 9.59 with 4, 9.54 with 8, in caches of 100 tokens" in said
    assert said.endswith("the norm after layer 0 moves by +20% (with 4 kept: +0%)")
    none = verdict("M", a_map((12.1, 12.0, 12.0, 12.0, 12.0), share=0.01))
    assert "M has no clear sinks" in none
    assert "it needs none" in none
    assert "12.10 without, 12.00 with 8" in none


@pytest.mark.parametrize(("num_tokens", "cache"), [(127, 1024), (4000, 31)])
def test_a_text_that_is_too_short_is_refused(num_tokens, cache):
    with pytest.raises(ConfigError, match="at least 32 tokens and a text 4 times as long"):
        cache_size_for(num_tokens, cache)


def test_the_cache_is_a_part_of_the_text():
    assert cache_size_for(1000, 1024) == 250
    assert cache_size_for(100_000, 1024) == 1024


# The heat map


def drawn(width, num_heads, *, no_color=False):
    console = Console(
        width=width,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        no_color=no_color,
        highlight=False,
    )
    shares = [head / (num_heads - 1) for head in range(num_heads)]
    rows = [HeatRow("0", shares, ("1,234",)), HeatRow("11", shares[::-1], ("5",))]
    print_heat_map(console, "caption", ("layer", "norm"), rows)
    return console.file.getvalue()


def test_cells_are_numbers_where_there_is_room():
    text = drawn(60, 5, no_color=True)
    assert " 0 25 50 75 99" in text.replace("\x1b[0m", "").replace("  ", " ")
    assert "1,234" in text
    assert "48;2;255;225;90" in drawn(60, 5)  # the hottest colour


@pytest.mark.parametrize(("width", "num_heads"), [(60, 32), (40, 90), (20, 200)])
def test_cells_shrink_to_the_terminal(width, num_heads):
    """A character each, then the mean of neighbours; no line is longer than the terminal."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", drawn(width, num_heads, no_color=True)).splitlines()
    assert all(len(line) <= width for line in lines)
    caption, _, rising, falling = lines
    assert caption == "caption"
    assert 0 < rising.index("░") < rising.index("█")
    assert 0 < falling.index("█") < falling.index("░")


# The command


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("A line of text that says little.\n" * 20, encoding="utf-8")
    return path


def test_the_command_in_all_formats(command, tiny_folder, text_file):
    """Markdown, CSV and JSON off a terminal; the verdict on standard error."""
    options = ("bench", "--sink-map", text_file, "-m", tiny_folder, "--window", "60")
    plain = command(*options)
    assert plain.code == 0, plain.err
    assert "| layer | head 0 | head 1 | head 2 | head 3 | first token | before |" in plain.out
    assert "| sinks | newest | perplexity |" in plain.out
    assert "sinks: the first 4 of 256 tokens draw" in plain.err
    assert "256 tokens of" in plain.err
    assert "caches of 64 tokens" in plain.err
    as_csv = list(csv.DictReader(io.StringIO(command(*options, "-o", "csv").out)))
    as_json = [json.loads(line) for line in command(*options, "-o", "json").out.splitlines()]
    assert len(as_csv) == len(as_json) == 4 * 4 + 4 + 5
    assert as_json[0] == {**as_json[0], "measure": "attention", "layer": 0, "head": 0}
    assert [float(row["value"]) for row in as_csv] == [row["value"] for row in as_json]
    assert {row["num_first"] for row in as_json if row["measure"] == "perplexity"} == {*SINK_SIZES}
    table = command(*options, "-o", "table")
    assert table.code == 0, table.err
    assert table.out.startswith("Attention to the first 4 tokens, by head, in percent; and norms")


def test_the_built_in_text_is_long_enough(command, tiny_folder):
    """Without a file; --limit cuts it."""
    result = command("bench", "--sink-map", "-m", tiny_folder, "--limit", "400", "-q")
    assert result.code == 0, result.err
    assert result.err == ""
    again = command("bench", "--sink-map", "-m", tiny_folder, "--limit", "400")
    assert "400 tokens of the built-in text, caches of 100 tokens" in again.err
    assert again.out == result.out


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures(command, tiny_folder, text_file, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"sinks.{suffix}"
    result = command("bench", "--sink-map", text_file, "-m", tiny_folder, "--plot", picture)
    assert result.code == 0, result.err
    assert picture.read_bytes().startswith({"png": b"\x89PNG", "svg": b"<?xml"}[suffix])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--sink-map", "nowhere.txt"), "no such file: nowhere.txt"),
        (("--sink-map", "--limit", "100"), "a text 4 times as long, got 1024 and 100"),
        (("--sink-map", "--plot", "picture.txt"), "--plot must end in .png"),
        (("--sink-map", "--policy", "window"), "leave out --policy"),
        (("--sink-map", "--keep", "here"), "--keep belongs to --ppl"),
        (("--sink-map", "--no-template"), "--no-template belongs to --streameval"),
        (("nowhere.txt",), "FILE belongs to --sink-map"),
        (("--sink-map", "--streameval"), "--streameval and --sink-map exclude each other"),
        (("--sink-map", "--ppl", "x.txt"), "--ppl and --sink-map exclude each other"),
    ],
)
def test_what_cannot_be_done_is_said(command, tiny_folder, options, said):
    result = command("bench", "-m", tiny_folder, *options)
    assert (result.code, result.out) == (2, "")
    assert said in result.err


def test_a_model_that_cannot_be_streamed_is_refused(command, tmp_path):
    """Learned positions: nothing is kept at another place."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=BYTE_VOCAB_SIZE, n_embd=32, n_head=4, n_layer=1, bos_token_id=1, eos_token_id=2
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    byte_tokenizer().save_pretrained(tmp_path / "gpt2")
    result = command("bench", "--sink-map", "-m", tmp_path / "gpt2")
    assert (result.code, result.out) == (3, "")
    assert "learned and absolute" in result.err


def test_a_map_that_moved_nowhere_has_a_verdict():
    """Norms that shrink are told with their sign."""
    found = a_map((12.1, 12.0, 12.0, 12.0, 12.0))
    curves = {WITHOUT: [[50.0] + [10.0] * 99 + [8.0] * 100], WITH: found.curves[WITH]}
    assert "moves by -20%" in verdict("M", replace(found, curves=curves))
