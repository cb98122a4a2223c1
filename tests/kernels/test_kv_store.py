"""kv_store: scales, saturation, NaN and slots against values worked out by hand."""

import math

import pytest
import torch
from batchinfer.kernels.common.fp8 import decode_finite
from batchinfer.kernels.kv_store import kv_store, rotary_kv_store

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture(autouse=True, params=["reference", "as dispatched"])
def _backend(request, monkeypatch):
    """The specification itself is tested also where a native backend stands before it."""
    if request.param == "reference":
        monkeypatch.setattr("batchinfer.kernels.kv_store.cpu.can_run", lambda *tensors: False)


def make_cache(dtype, scaled, num_blocks=3, heads=2, block_size=4, head_dim=8):
    cache = torch.zeros(num_blocks, heads, block_size, head_dim).to(dtype)
    return cache, torch.full(cache.shape[:-1], -1.0) if scaled else None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_copies_to_slots_and_skips_negative_ones(dtype):
    k, v = torch.randn(3, 2, 8).to(dtype), torch.randn(3, 2, 8).to(dtype)
    k_cache, v_cache = make_cache(dtype, False)[0], make_cache(dtype, False)[0]
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    expected_k[1, :, 3], expected_v[1, :, 3] = k[0], v[0]  # slot 7
    expected_k[0, :, 2], expected_v[0, :, 2] = k[2], v[2]
    kv_store(k, v, k_cache, v_cache, torch.tensor([7, -1, 2]))
    assert torch.equal(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
def test_blocks_may_lie_apart(dtype):
    k, v = torch.randn(3, 2, 8).bfloat16(), torch.randn(3, 2, 8).bfloat16()
    scaled = dtype == E4M3
    (k_cache, k_scale), (v_cache, v_scale) = make_cache(dtype, scaled), make_cache(dtype, scaled)
    memory = torch.zeros(3, 5, *k_cache.shape[1:]).to(dtype)
    scales = [torch.full_like(k_scale, -1.0) if scaled else None for _ in "kv"]
    slots = torch.tensor([7, -1, 2])
    kv_store(k, v, k_cache, v_cache, slots, k_scale, v_scale)
    kv_store(k, v, memory[:, 3], memory[:, 1], slots, *scales)
    for part, expected in ((3, k_cache), (1, v_cache)):
        assert torch.equal(memory[:, part].float(), expected.float())
    assert not memory[:, ::2].float().any()
    assert not scaled or (torch.equal(scales[0], k_scale) and torch.equal(scales[1], v_scale))


def best_scale(vector, dtype, largest, weight=1.0):
    return best_codes(vector, dtype, largest, weight)[0]


def best_codes(vector, dtype, largest, weight=1.0):
    """The scale and the codes: by trial in float64, one divisor after the other; then the scale by least squares over
    the codes."""
    least = vector.abs().max().item() / largest
    if not least:
        return least, torch.zeros_like(vector, dtype=torch.float64)
    if dtype == torch.int8:
        return least, (vector.double() / least).round()

    def codes(divisor):
        return (vector.double() / divisor).float().to(dtype).double()

    def squared_error(divisor):
        return (weight * (vector.double() - divisor * codes(divisor)).square()).sum().item()

    chosen = codes(min((least * 2 ** (i / 8) for i in range(8)), key=squared_error))
    return ((weight * chosen * vector.double()).sum() / (weight * chosen.square()).sum()).item(), chosen


@pytest.mark.parametrize(("dtype", "largest"), [(E4M3, 448.0), (E5M2, 57344.0), (torch.int8, 127.0)])
def test_scale_a_token_and_head(dtype, largest):
    k = torch.randn(2, 2, 8)
    k[1, 0] = 0.0
    cache, scale = make_cache(dtype, True)
    other, other_scale = make_cache(dtype, True)
    kv_store(k, -2 * k, cache, other, torch.tensor([5, 0]), scale, other_scale)
    for token, (block, offset) in enumerate([(1, 1), (0, 0)]):
        for head in range(2):
            expected, codes = best_codes(k[token, head], dtype, largest)
            assert scale[block, head, offset].item() == pytest.approx(expected, rel=1e-6, abs=1e-37)
            assert other_scale[block, head, offset].item() == pytest.approx(2 * expected, rel=1e-6, abs=1e-37)
            assert torch.equal(cache[block, head, offset].double(), codes)
            assert torch.equal(other[block, head, offset].double(), -codes)
    assert (scale == -1).sum() == scale.numel() - 4


@pytest.mark.parametrize("head_dim", [64, 80, 40])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_chosen_scales_lessen_the_error_of_float8(dtype, head_dim):
    k = torch.randn(500, 2, head_dim) * torch.logspace(-3, 3, 500)[:, None, None]
    cache, scale = make_cache(dtype, True, num_blocks=125, head_dim=head_dim)
    kv_store(k, k, cache, cache.clone(), torch.arange(500), scale, scale.clone())
    stored = (cache.float() * scale[..., None]).transpose(1, 2).reshape(k.shape)
    least = k.abs().amax(-1, keepdim=True) / torch.finfo(dtype).max
    plain = (k / least).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype).float() * least
    error, plain_error = ((rounded - k).square().sum(-1) / k.square().sum(-1) for rounded in (stored, plain))
    assert (error <= plain_error * 1.0001).all()
    assert error.mean() < 0.85 * plain_error.mean()


@pytest.mark.parametrize(("dtype", "largest"), [(E4M3, 448.0), (E5M2, 57344.0)])
def test_values_beyond_the_maximum_saturate_and_nan_stays(dtype, largest):
    k = torch.tensor([1e6, -1e6, math.inf, -math.inf, math.nan, largest, 1.0, 0.0]).view(1, 1, 8)
    cache, _ = make_cache(dtype, False, heads=1)
    kv_store(k, k, cache, cache.clone(), torch.tensor([0]))
    stored = cache[0, 0, 0].float().tolist()
    assert stored[:4] == [largest, -largest, largest, -largest]
    assert math.isnan(stored[4])
    assert stored[5:] == [largest, 1.0, 0.0]


def test_1000_in_e4m3_is_448_without_a_scale_and_1000_with_one():
    k = torch.full((1, 1, 8), 1000.0)
    cache, _ = make_cache(E4M3, False, heads=1)
    kv_store(k, k, cache, cache.clone(), torch.tensor([0]))
    assert cache[0, 0, 0].float().unique().tolist() == [448.0]
    cache, scale = make_cache(E4M3, True, heads=1)
    kv_store(k, k, cache, cache.clone(), torch.tensor([0]), scale, scale.clone())
    assert (cache[0, 0, 0].float() * scale[0, 0, 0]).tolist() == pytest.approx([1000.0] * 8)


@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.int8])
def test_nan_in_one_head_marks_its_scale_only(dtype):
    k = torch.ones(2, 2, 8)
    k[0, 1, 3] = math.nan
    cache, scale = make_cache(dtype, True)
    kv_store(k, k, cache, cache.clone(), torch.tensor([0, 1]), scale, scale.clone())
    assert scale[0, :, :2].isnan().tolist() == [[False, False], [True, False]]


@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.int8])
@pytest.mark.parametrize("num_scales", [1, 2])
def test_static_scales_divide_and_saturate(dtype, num_scales):
    """Each value by hand: 3 / 0.25 = 12 and 3 / 0.5 = 6 are held exactly, 1e9 and -1e9 become the format's largest."""
    scale = torch.tensor([0.25, 0.5])[:num_scales]
    before = scale.clone()
    cache, _ = make_cache(dtype, False, head_dim=4)
    other, _ = make_cache(dtype, False, head_dim=4)
    k = torch.tensor([3.0, 1e9, -1e9, 0.0]).expand(1, 2, 4)
    kv_store(k, -k, cache, other, torch.tensor([6]), scale, scale)
    largest = {E4M3: 448.0, E5M2: 57344.0, torch.int8: 127.0}[dtype]
    for head, quotient in enumerate([12.0, 6.0] if num_scales == 2 else [12.0, 12.0]):
        assert cache[1, head, 2].float().tolist() == [quotient, largest, -largest, 0.0]
        assert other[1, head, 2].float().tolist() == [-quotient, -largest, largest, 0.0]
    assert torch.equal(scale, before)
    assert (cache.float() != 0).sum() == 6


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_nan_stays_nan_under_a_static_scale(dtype):
    k = torch.tensor([[[1.0, math.nan]]])
    cache, _ = make_cache(dtype, False, heads=1, head_dim=2)
    kv_store(k, k, cache, cache.clone(), torch.tensor([0]), torch.ones(1), torch.ones(1))
    assert cache[0, 0, 0].float().isnan().tolist() == [False, True]


@pytest.mark.parametrize("scaled", [False, True])
def test_slots_that_straddle_two_to_the_31_elements(scaled):
    """Slots on both sides of element 2^31, and of 2^31 scales. Only pages that are touched get memory."""
    head_dim = 1 if scaled else 64
    border = (1 << 31) // (16 * head_dim)
    cache, scale = make_cache_unwritten((border + 2, 1, 16, head_dim), scaled)
    slots = torch.tensor([16 * border - 1, 16 * border, 16 * border + 17, 3])
    k = torch.tensor([1.0, 2.0, 4.0, 8.0])[:, None, None].expand(4, 1, head_dim)
    kv_store(k, k, cache, cache, slots, scale, scale)
    for slot, value in zip(slots.tolist(), (1.0, 2.0, 4.0, 8.0), strict=True):
        stored = cache[slot // 16, 0, slot % 16].float()
        factor = 1.0 if scale is None else scale[slot // 16, 0, slot % 16].item()
        assert (stored * factor).tolist() == pytest.approx([value] * head_dim, rel=1e-6)


def make_cache_unwritten(shape, scaled):
    return torch.empty(shape, dtype=E5M2), torch.empty(shape[:-1]) if scaled else None


def test_nothing_but_the_slots_is_written_where_most_rows_are_padding():
    """A captured batch of 8 with 5 tokens: the other rows hold NaN and the slot -1."""
    k = torch.full((8, 2, 8), math.nan)
    k[:5] = 1.0
    cache, scale = make_cache(E4M3, True)
    kv_store(k, k, cache, cache.clone(), torch.tensor([0, 1, 2, 3, 4, -1, -1, -1]), scale, scale.clone())
    assert not cache[2].float().any()  # the last block
    assert cache.float().isfinite().all()
    assert (scale != -1).sum() == 5 * 2


@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.int8])
def test_fast_decoding_equals_torch_for_each_code(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    expected = codes.float()
    finite = ~expected.isnan()
    assert torch.equal(decode_finite(codes)[finite], expected[finite])


def test_refuses_what_does_not_fit():
    cache, scale = make_cache(torch.int8, True)
    k = torch.zeros(1, 2, 8)
    with pytest.raises(ValueError, match="needs scales"):
        kv_store(k, k, cache, cache, torch.tensor([0]))
    with pytest.raises(ValueError, match="do not fit"):
        kv_store(k[:, :1], k, cache, cache, torch.tensor([0]), scale, scale)
    with pytest.raises(ValueError, match="takes no scales"):
        kv_store(k, k, cache.float(), cache.float(), torch.tensor([0]), scale, scale)
    with pytest.raises(ValueError, match="of one kind"):
        kv_store(k, k, cache, cache, torch.tensor([0]), scale, torch.ones(2))
    with pytest.raises(ValueError, match="do not fit"):
        kv_store(k, k, cache, cache, torch.tensor([0]), torch.ones(3), torch.ones(3))


@pytest.mark.parametrize(
    ("offset", "scale", "message"),
    [
        (torch.zeros(1, 2, 7), torch.zeros(3, 2, 4), r"k_offset torch.float32 \(1, 2, 7\): must be .* 2, 8"),
        (torch.zeros(2, 8), torch.zeros(3, 2, 4), "must be float32"),
        (torch.zeros(1, 2, 8, dtype=torch.bfloat16), torch.zeros(3, 2, 4), "must be float32"),
        (torch.zeros(1, 8, 2).transpose(1, 2), torch.zeros(3, 2, 4), "contiguous"),
        (torch.zeros(1, 2, 8), torch.ones(2), "k_offset needs a cache with a scale for each token"),
    ],
)
def test_refuses_an_offset_that_does_not_fit(offset, scale, message):
    cache, k, table = torch.zeros(3, 2, 4, 8, dtype=torch.int8), torch.zeros(1, 2, 8), torch.ones(4, 8)
    zero = torch.tensor([0])
    with pytest.raises(ValueError, match=message):
        rotary_kv_store(k, k, k, zero, table, cache, cache, zero, scale, scale, offset, None, zero)
    with pytest.raises(ValueError, match=message.replace("k_offset", "k_weight")):
        rotary_kv_store(k, k, k, zero, table, cache, cache, zero, scale, scale, None, offset, zero)
    with pytest.raises(ValueError, match="k_offset and k_weight need token_positions"):
        rotary_kv_store(k, k, k, zero, table, cache, cache, zero, *[torch.zeros(3, 2, 4)] * 2, torch.zeros(1, 2, 8))


@pytest.mark.parametrize(("dtype", "largest"), [(E4M3, 448.0), (E5M2, 57344.0), (torch.int8, 127.0)])
def test_errors_of_keys_count_by_the_weights_of_their_segment(dtype, largest):
    generator = torch.Generator().manual_seed(4)
    k = torch.randn(40, 2, 8, generator=generator)
    weights = torch.rand(3, 2, 8, generator=generator) ** 8  # a few dimensions count, others hardly
    token_positions = torch.arange(40) * 19
    caches, scales = zip(*(make_cache(dtype, True, num_blocks=10) for _ in "kv"), strict=True)
    unturned = torch.tensor([[1.0] * 4 + [0.0] * 4])
    zeros, slots = torch.zeros(40).long(), torch.arange(40)
    rotary_kv_store(k, k, k, zeros, unturned, *caches, slots, *scales, None, weights, token_positions)
    differing = 0
    for token in range(40):
        for head in range(2):
            weight = weights[token_positions[token] // 256, head].double()
            expected = best_scale(k[token, head], dtype, largest, weight)
            plain = best_scale(k[token, head], dtype, largest)
            stored = [scale[token // 4, head, token % 4].item() for scale in scales]
            assert stored == pytest.approx([expected, plain], rel=1e-5)
            differing += abs(expected / plain - 1) > 1e-3
    assert (differing > 20) == (dtype != torch.int8)


@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.int8])
def test_offset_of_its_segment_is_taken_off_a_rotated_key(dtype):
    """A turn by 90 degrees: (x, y) becomes (-y, x). What is left of a key that is the offset and a part that the format
    holds exactly is that part, and values stay whole."""
    left = torch.tensor([[1.0, -0.5, 0.25, 2.0]]).repeat(3, 1)[:, None]
    offsets = torch.randn(3, 1, 4).mul(8).round() / 8  # so that sums are exact
    token_positions = torch.tensor([255, 256, 767])
    stored = left + offsets[[0, 1, 2]]
    k = torch.cat((stored[..., 2:], -stored[..., :2]), -1)
    caches, scales = zip(*(make_cache(dtype, True, heads=1, head_dim=4) for _ in "kv"), strict=True)
    turn, slots = torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.tensor([0, 5, 2])
    rotary_kv_store(k, k, k, torch.zeros(3).long(), turn, *caches, slots, *scales, offsets, None, token_positions)
    keys, values = (
        (cache.float() * scale[..., None]).transpose(1, 2).flatten(0, 1)
        for cache, scale in zip(caches, scales, strict=True)
    )
    torch.testing.assert_close(keys[slots], left, rtol=0, atol=0.01)
    torch.testing.assert_close(values[slots], k, rtol=0.07, atol=0.15 if dtype == E5M2 else 0.04)
