"""Attention merged by log-sum-exp: the mathematics of the CUDA path, with kernels that a CPU has.

The oracle is the explicit attention in float32. What only a GPU can show, its kernel's own rules
for strides, is left to the tests with the `gpu` marker.
"""

import pytest
import torch

from streamchat.ops import fused, kernels
from streamchat.ops.attention import Part, decode_attention, merged_attention, score_mask
from streamchat.ops.fused import (
    ALIGNMENT,
    additive_mask,
    efficient_kernel,
    fused_decode_attention,
    fused_merged_attention,
)

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, SCALING = 6, 2, 16, 0.3


def plain_kernel(piece, scaling):
    """Output and log-sum-exp, spelled out, in float64."""
    query, keys, values, bias = piece
    scores = query.double() @ keys.double().transpose(-1, -2) * scaling
    if bias is not None:
        scores = scores + bias
    return scores.softmax(-1) @ values.double(), scores.logsumexp(-1)


def cpu_kernel(piece, scaling):
    """The fused kernel that torch has for CPUs, whose results are those of the one for CUDA."""
    query, keys, values, bias = piece
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, attn_mask=bias, scale=scaling
    )


KERNELS = pytest.mark.parametrize("kernel", [plain_kernel, cpu_kernel])


def make_part(num_queries, num_keys, *, seed, hidden=None, batch_size=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    query, keys, values = (
        torch.randn(batch_size, heads, length, HEAD_DIM, generator=generator)
        for heads, length in (
            (NUM_HEADS, num_queries),
            (NUM_KV_HEADS, num_keys),
            (NUM_KV_HEADS, num_keys),
        )
    )
    return Part(query, keys.to(dtype), values.to(dtype), hidden)


def with_bias(part):
    if part.hidden is None:
        return part
    return Part(part.query, part.keys, part.values, additive_mask(part.hidden, part.keys.dtype))


def explicit(parts):
    """The same parts as the explicit attention wants them."""
    masks = [None if part.hidden is None else score_mask(part.hidden) for part in parts]
    return [Part(p.query, p.keys, p.values, m) for p, m in zip(parts, masks, strict=True)]


def assert_merges(parts, kernel, **tolerance):
    expected = merged_attention(explicit(parts), SCALING)
    got = fused_merged_attention([with_bias(part) for part in parts], SCALING, kernel)
    torch.testing.assert_close(got.float(), expected, **tolerance)


@KERNELS
@pytest.mark.parametrize("num_queries", [1, 5, 70])
@pytest.mark.parametrize("num_keys", [1, 63, 128, 600, 1024, 1030])
def test_it_is_the_explicit_attention(kernel, num_queries, num_keys):
    """Two parts, one of them long enough to be cut, give what the explicit attention gives.

    Without and with a remainder of the cut.
    """
    parts = [make_part(num_queries, n, seed=n) for n in (4, num_keys)]
    parts[1] = Part(parts[0].query + 1, *(getattr(parts[1], f) for f in ("keys", "values")), None)
    assert_merges(parts, kernel)


@KERNELS
@pytest.mark.parametrize("num_queries", [1, 5])
@pytest.mark.parametrize("num_keys", [5, 64, 700, 1030])
def test_what_is_hidden_does_not_count(kernel, num_queries, num_keys):
    """Any mask gives what it gives in the explicit attention, also where whole pieces are hidden.

    Every query sees one key of the first part, so that it sees something.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.rand(num_queries, num_keys, generator=generator) < 0.5
    hidden[:, : num_keys // 2] = True
    hidden_sinks = torch.ones(num_queries, 4, dtype=torch.bool)
    hidden_sinks[:, 2] = False
    parts = [
        make_part(num_queries, 4, seed=1, hidden=hidden_sinks),
        make_part(num_queries, num_keys, seed=2, hidden=hidden),
    ]
    assert_merges(parts, kernel)
    parts[1] = make_part(num_queries, num_keys, seed=2, hidden=torch.ones_like(hidden))
    assert_merges(parts, kernel)


def test_a_mask_that_is_not_applied_is_seen():
    """The comparison above can fail: without its mask the result is another."""
    hidden = torch.zeros(1, 700, dtype=torch.bool)
    hidden[0, 650:] = True
    part = make_part(1, 700, seed=0, hidden=hidden)
    bare = Part(part.query, part.keys, part.values, None)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(
            fused_merged_attention([bare], SCALING, plain_kernel).float(),
            merged_attention(explicit([part]), SCALING),
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_in_16_bit(dtype):
    """With 16-bit keys the result is off by no more than rounding query and output costs."""
    hidden = torch.zeros(1, 700, dtype=torch.bool)
    hidden[0, 650:] = True
    parts = [
        make_part(1, 4, seed=1, dtype=dtype),
        make_part(1, 700, seed=2, dtype=dtype, hidden=hidden),
    ]
    epsilon = torch.finfo(dtype).eps
    assert_merges(parts, cpu_kernel, rtol=0, atol=4 * epsilon)


@pytest.mark.parametrize("num_keys", [2, 4, 5, 1000])
def test_decode_is_decode(monkeypatch, num_keys):
    """A single query over sinks and window, with no window yet, too."""
    monkeypatch.setattr(fused_merged_attention, "__defaults__", (cpu_kernel,))
    part = make_part(1, num_keys, seed=3)
    arguments = (part.query, part.query - 1, part.keys, part.values, min(4, num_keys), SCALING)
    torch.testing.assert_close(fused_decode_attention(*arguments), decode_attention(*arguments))


def pieces_of(part):
    return list(fused._pieces(with_bias(part)))


@pytest.mark.parametrize("num_queries", [1, 5, 300])
@pytest.mark.parametrize("num_keys", [4, 60, 500, 1020, 1024, 16384])
def test_a_bias_is_aligned_as_the_kernel_wants_it(num_queries, num_keys):
    """Strides and start of every piece's bias are multiples of 16 elements, the last stride is 1.

    The rule is that of torch's kernel; its memory behind the last column belongs to the row.
    """
    hidden = torch.zeros(num_queries, num_keys, dtype=torch.bool)
    part = make_part(num_queries, num_keys, seed=0, hidden=hidden, batch_size=1)
    for piece in pieces_of(part):
        *outer, last = piece.bias.stride()
        assert last == 1
        sizes = piece.bias.shape
        assert all(s % ALIGNMENT == 0 for s, n in zip(outer, sizes, strict=False) if n > 1)
        assert piece.bias.storage_offset() % ALIGNMENT == 0
        room = piece.bias.untyped_storage().nbytes() // piece.bias.element_size()
        ends = piece.bias.storage_offset() + sum(
            (n - 1) * s for s, n in zip(outer, sizes, strict=False)
        )
        assert room >= ends + -(-sizes[-1] // ALIGNMENT) * ALIGNMENT


@pytest.mark.parametrize("num_keys", [256, 1024, 4096, 16384])
def test_a_long_window_keeps_a_gpu_busy(num_keys):
    """One row of 8 key heads gives work to 32 thread blocks at least; keys are never copied."""
    query = torch.zeros(1, 32, 1, HEAD_DIM)
    keys = torch.zeros(1, 8, num_keys, HEAD_DIM)
    (piece,) = fused._pieces(Part(query, keys, keys, None))
    assert piece.keys.shape[0] * piece.keys.shape[1] >= 32
    assert piece.keys.data_ptr() == keys.data_ptr()
    assert piece.keys.shape[1] * piece.keys.shape[2] == num_keys


def test_the_cuda_kernel_takes_these_shapes():
    """Torch's own shape function of the CUDA kernel accepts a piece; its rows come padded to 32.

    It would miss what only the kernel itself checks.
    """
    part = make_part(1, 1024, seed=0, hidden=torch.zeros(1, 1024, dtype=torch.bool))
    (piece,) = pieces_of(part)
    on_meta = fused.Piece(*(tensor.to("meta") for tensor in piece))
    out, log_sum_exp = efficient_kernel(on_meta, SCALING)
    assert out.shape == piece.query.shape
    assert log_sum_exp.shape == piece.query.shape[:-1]


def test_the_device_chooses(monkeypatch):
    """CUDA gets the fused attention, where it knows the dtype; everything else the explicit one."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert kernels.kernels_for(cpu, torch.float32) is kernels.EXPLICIT
    assert kernels.kernels_for(cuda, torch.float16) is kernels.FUSED
    for capability, expected in (((7, 5), kernels.EXPLICIT), ((8, 0), kernels.FUSED)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device, c=capability: c)
        assert kernels.kernels_for(cuda, torch.bfloat16) is expected
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert kernels.kernels_for(cuda, torch.float16) is kernels.EXPLICIT


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_queries", [1, 5, 300])
@pytest.mark.parametrize("num_keys", [5, 60, 700, 1020, 1024, 4100])
def test_on_cuda(dtype, num_queries, num_keys):
    """The kernel itself, against the explicit attention, masks and remainders included."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.rand(num_queries, num_keys, generator=generator) < 0.5
    parts = [
        make_part(num_queries, 4, seed=1, dtype=dtype),
        make_part(num_queries, num_keys, seed=2, dtype=dtype, hidden=hidden),
    ]
    parts = [
        Part(*(None if t is None else t.cuda() for t in (p.query, p.keys, p.values, p.hidden)))
        for p in parts
    ]
    tolerance = 1e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    assert_merges(parts, efficient_kernel, rtol=0, atol=tolerance)
