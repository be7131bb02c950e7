from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import StoreError
from etude.weights import delta
from etude.weights.compare import compare
from etude.weights.pieces import Stored
from etude.weights.rice import FEW, Coded, Reader, Squeezed, Writer, pack, scale_of, unpack

FLOATS = ["F32", "BF16", "F16", "F8_E4M3", "F8_E5M2"]


def random_bits(random: np.random.Generator, dtype: str, count: int) -> np.ndarray:
    bits = delta.LAYOUTS[dtype].bits
    return np.frombuffer(random.bytes(count * bits.itemsize), bits)


def roundtrip(old: np.ndarray, new: np.ndarray, dtype: str) -> int:
    """Bytes that it took."""
    coded = delta.encode(old, new, dtype)
    out = np.full_like(new, 77)
    delta.decode(old, coded, dtype, out)
    np.testing.assert_array_equal(out, new)
    in_place = old.copy()
    delta.decode(in_place, coded, dtype, in_place)
    np.testing.assert_array_equal(in_place, new)
    return len(coded)


def moved(old: np.ndarray, share: float, random: np.random.Generator, size: float = 1.0) -> np.ndarray:
    """`share` of the elements a few units in the last place away."""
    steps = np.rint(random.standard_cauchy(len(old)) * size).clip(-100, 100).astype(np.int64)
    steps[random.random(len(old)) >= share] = 0
    return (old.astype(np.int64) + steps).astype(old.dtype)


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Bits, rounded to the nearest."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def trained(count: int, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """bfloat16 weights before and after a step of Adam's size."""
    random = np.random.default_rng(7)
    masters = random.normal(0, 0.02, count)
    return bfloat16(masters), bfloat16(masters + random.standard_t(4, count) * 0.3 * rate)


@pytest.mark.parametrize("dtype", list(delta.LAYOUTS))
@pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 65, 1000, delta.CHUNK + 3])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.2, 1.0])
def test_any_change_of_any_dtype_comes_back_bit_for_bit(dtype: str, count: int, share: float) -> None:
    random = np.random.default_rng(count)
    old = random_bits(random, dtype, count)
    other = random_bits(random, dtype, count)
    assert roundtrip(old, np.where(random.random(count) < share, other, old), dtype) <= other.nbytes + 60
    roundtrip(old, moved(old, share, random), dtype)
    whole = delta.encode(None, other, dtype)
    out = np.empty_like(other)
    delta.decode(None, whole, dtype, out)
    np.testing.assert_array_equal(out, other)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80), st.data(), st.sampled_from(FLOATS))
def test_small_tensors_of_any_bits_come_back(old: bytes, data: st.DataObject, dtype: str) -> None:
    """NaN, infinities, subnormals, both zeros: bits are bits."""
    size = delta.LAYOUTS[dtype].bits.itemsize
    old = old[: len(old) // size * size]
    new = data.draw(st.binary(min_size=len(old), max_size=len(old)))
    bits = delta.LAYOUTS[dtype].bits
    roundtrip(np.frombuffer(old, bits), np.frombuffer(new, bits), dtype)


def test_what_did_not_change_takes_a_few_bytes() -> None:
    old = random_bits(np.random.default_rng(0), "BF16", 1 << 20)
    assert roundtrip(old, old.copy(), "BF16") < 10


@pytest.mark.parametrize("rate", [1e-6, 3e-6, 1e-5])
def test_small_steps_take_fewer_bytes_than_the_entropy_of_a_code_that_knows_no_exponents(rate: float) -> None:
    old, new = trained(1 << 20, rate)
    change = next(iter(compare({"w": Stored("BF16", old)}, {"w": Stored("BF16", new)})))
    assert change.coded_bytes == roundtrip(old, new, "BF16")
    assert change.coded_bytes < 0.85 * change.bound_bytes
    assert change.changed == int((old != new).sum())


def test_the_smallest_encoding_is_taken() -> None:
    random = np.random.default_rng(3)
    noise = [random_bits(random, "BF16", 1 << 16) for _ in range(2)]
    kinds = {}
    for name, (old, new) in {
        "changes": trained(1 << 16, 1e-6),
        "raw": (noise[0], noise[1]),
        "planes": (noise[0], noise[0] ^ random.integers(0, 16, 1 << 16, dtype=np.uint16)),
    }.items():
        kinds[name] = msgspec.msgpack.decode(delta.encode(old, new, "BF16"), type=Coded).kind
    assert kinds == {"changes": 1, "raw": 3, "planes": 2}


def test_tensors_of_another_size_are_not_compared() -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        delta.encode(bytes(4), bytes(6), "BF16")


# Damage: whatever the bytes are, decoding ends in the right tensor or in a StoreError


def test_a_difference_from_another_tensor_is_an_error_or_gives_something_else() -> None:
    """What the digest then catches; never an exception of another kind, nor an endless one."""
    old, new = trained(4000, 1e-5)
    coded = delta.encode(old, new, "BF16")
    random = np.random.default_rng(5)
    for _ in range(50):
        other = moved(old, 0.3, random, size=300.0)
        out = np.empty_like(new)
        try:
            delta.decode(other, coded, "BF16", out)
        except StoreError:
            continue
        assert not np.array_equal(out, new)


@pytest.mark.parametrize("rate", [1e-5, 1e-2])
def test_damaged_bytes_are_a_store_error_or_another_tensor(rate: float) -> None:
    old, new = trained(3000, rate)
    coded = delta.encode(old, new, "BF16")
    random = np.random.default_rng(11)
    kept, refused = old.copy(), 0
    for _ in range(400):
        broken = bytearray(coded)
        for place in random.integers(0, len(broken), random.integers(1, 4)):
            broken[place] ^= 1 << int(random.integers(8))
        broken = broken[: random.integers(1, len(broken) + 1)] if random.random() < 0.3 else broken
        out = np.zeros_like(new)
        try:
            delta.decode(old, bytes(broken), "BF16", out)
        except StoreError:
            refused += 1
    assert refused > 100
    np.testing.assert_array_equal(old, kept)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_bytes_that_are_no_difference_are_refused(data: bytes) -> None:
    out = np.zeros(8, np.uint16)
    try:
        delta.decode(out.copy(), data, "BF16", out)
    except StoreError:
        return
    assert msgspec.msgpack.decode(data, type=Coded).kind in range(4)


def test_a_stream_that_claims_to_be_huge_is_refused_before_it_is_unpacked() -> None:
    old, new = trained(1000, 1e-5)
    coded = msgspec.msgpack.decode(delta.encode(old, new, "BF16"), type=Coded)
    streams = unpack(coded.sizes, coded.packed)
    coded.sizes, coded.packed = pack([(1 << 40, b"") if stream is not None else None for stream in streams])
    with pytest.raises(StoreError, match="claims 1099511627776 bytes"):
        delta.decode(old, msgspec.msgpack.encode(coded), "BF16", np.empty_like(new))


# Numbers

a_stream = st.one_of(
    st.none(),
    st.tuples(st.integers(0, 2**40), st.binary()),
    st.tuples(st.just(-1), st.binary(min_size=1)),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(a_stream, min_size=1, max_size=16))
def test_streams_come_back_from_their_package_and_not_from_a_part_of_it(streams: list[Squeezed]) -> None:
    sizes, packed = pack(streams)
    assert unpack(sizes, packed) == streams
    for some, damaged in ((sizes, packed + b"x"), (sizes, packed[:-1]), ([*sizes, 1], packed), ([*sizes, -2], packed)):
        if some != sizes or damaged != packed:
            with pytest.raises(StoreError, match="damaged"):
                unpack(some, damaged)


def test_too_many_streams_are_refused() -> None:
    old, new = trained(1000, 1e-5)
    coded = msgspec.msgpack.decode(delta.encode(old, new, "BF16"), type=Coded)
    coded.sizes, coded.packed = [0] * 1_000_000, b""
    with pytest.raises(StoreError, match="it has 1000000 streams"):
        delta.decode(old, msgspec.msgpack.encode(coded), "BF16", np.empty_like(new))


@pytest.mark.parametrize("count", [0, 1, FEW - 1, FEW, FEW + 1])
@pytest.mark.parametrize("scale", [0, 3, 9, 20])
def test_few_numbers_and_many_come_back(count: int, scale: int) -> None:
    values = np.random.default_rng(count).geometric(0.7 / (1 << scale), count).astype(np.uint32)
    values[: count // 3] += np.uint32(300 << scale)  # past what unary says
    writer = Writer()
    for _ in range(3):
        writer.numbers(values, scale)
    reader = Reader(writer.squeezed(), limit=1 << 20)
    for _ in range(3):
        assert np.array_equal(reader.numbers(count, scale), values)
    reader.finish()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=50), st.integers(0, 32))
def test_numbers_of_any_size_come_back_at_any_scale(values: list[int], scale: int) -> None:
    writer = Writer()
    writer.numbers(np.array(values, np.uint32), scale)
    reader = Reader(writer.squeezed(), limit=1000)
    assert reader.numbers(len(values), scale).tolist() == values
    reader.finish()


def test_numbers_cost_little_more_than_their_entropy() -> None:
    """Geometric gaps at a density of 1 in 100: 8.1 bits each by their entropy."""
    share = 0.01
    gaps = np.random.default_rng(2).geometric(share, 100_000).astype(np.uint32) - 1
    writer = Writer()
    writer.numbers(gaps, scale_of(float(gaps.mean())))
    size = sum(len(stream[1]) for stream in writer.squeezed() if stream)
    entropy = -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) / share
    assert 8 * size / len(gaps) < 1.02 * entropy
