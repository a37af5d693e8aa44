"""The Philox stream: published vectors, an independent reference, frozen numbers, distributions."""

from __future__ import annotations

import hashlib
import math
import struct

import pytest
import torch

from comhe.random import Stream, key_words, philox

MASK = 0xFFFFFFFF


# An independent reference: Random123's definition on Python integers, and the layout written down again.


def reference_philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high1 ^ c[1] ^ k0, low1, high0 ^ c[3] ^ k1, low0]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return tuple(c)


def reference_words(seed: int, key: str, epoch: int, count: int, first_block: int = 0) -> list[int]:
    name = struct.unpack("<II", hashlib.blake2b(key.encode("utf-8"), digest_size=8).digest())
    words: list[int] = []
    for block in range(first_block, first_block + -(-count // 4)):
        words += reference_philox((block, epoch % 2**32, *name), (seed % 2**32, seed // 2**32))
    return words[:count]


def rounded(x: float) -> float:
    """To float32."""
    return struct.unpack("<f", struct.pack("<f", x))[0]


def reference_normals(words: list[int]) -> list[float]:
    """Box and Muller in double precision on the words as float32 holds them."""
    normals: list[float] = []
    for first, second in zip(words[::2], words[1::2], strict=True):
        radius = math.sqrt(-2 * math.log(rounded(rounded(first) + 0.5) / 2**32))
        angle = rounded(rounded(second) * rounded(2 * math.pi / 2**32))
        normals += [radius * math.cos(angle), radius * math.sin(angle)]
    return normals


# Philox4x32-10 in Random123's kat_vectors: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def from_hex(words: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in words.split())


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, result: str) -> None:
    c, (k0, k1) = from_hex(counter), from_hex(key)
    c0, c1, c2, c3 = (torch.tensor([word]) for word in c)
    assert tuple(int(word) for word in philox((c0, c1, c2, c3), (k0, k1))) == from_hex(result)
    assert reference_philox(c, (k0, k1)) == from_hex(result)


SEEDS = [0, 1, 2**32 - 1, 2**32, 0x0123456789ABCDEF, 2**64 - 1]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("key", ["", "layer 3", "Größe/α"])
@pytest.mark.parametrize("epoch", [0, 1, 2**31, 2**32 - 1, 2**32 + 5])
def test_words_are_the_reference(seed: int, key: str, epoch: int) -> None:
    stream = Stream(seed, key, epoch)
    assert stream.words(10).tolist() == reference_words(seed, key, epoch, 10)
    # Three blocks are spent: the next read begins at the fourth.
    assert stream.words(5).tolist() == reference_words(seed, key, epoch, 5, first_block=3)


def test_normals_are_the_reference() -> None:
    normals = Stream(5, "normals", 2).normal(4096)
    expected = torch.tensor(reference_normals(reference_words(5, "normals", 2, 4096)), dtype=torch.float64)
    assert normals.dtype == torch.float32
    assert (normals.double() - expected).abs().max() < 1e-6


def test_signs_integers_and_permutations_are_read_from_the_words() -> None:
    words = reference_words(3, "k", 4, 50)
    assert Stream(3, "k", 4).signs(5, 10).flatten().tolist() == [-1.0 if word >= 2**31 else 1.0 for word in words]
    for high in (1, 2, 7, 1000, 2**31):
        integers = Stream(3, "k", 4).integers(high, 50)
        assert integers.dtype == torch.int64
        assert integers.tolist() == [word * high // 2**32 for word in words]
    assert Stream(3, "k", 4).permutation(50).tolist() == sorted(range(50), key=lambda i: words[i])


def test_normals_of_extreme_words_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    words = tuple(torch.tensor([[0, 0], [0, MASK], [MASK, MASK], [0, MASK]]))
    monkeypatch.setattr(Stream, "_blocks", lambda self, count: words)
    largest = math.sqrt(2 * math.log(2**33))
    assert Stream(0, "").normal(8).tolist() == pytest.approx([largest, 0, 0, 0, largest, 0, 0, 0], abs=1e-5)


# Frozen: every number published with this library depends on these.

FROZEN_WORDS = {
    (0, "", 0): "729180fd f98b33ec 1afbbb2f ed26c386 c087408a ba921be9",
    (0, "fan_in 576", 0): "1e94cb41 dcef9c91 1285fbf6 90e826c3 d80e9bdb 1bb83b2d",
    (0, "fan_in 576", 1): "34e77a72 b9cdf190 0b1c2702 8a701a5b e3b6a50b d6993fa8",
    (12345678901234567890, "fan_in 576", 74999): "998907df 187cddcc 22465026 a9a58405 4c2198db 83c83f89",
}
FROZEN_NORMALS = {
    (0, "", 0): [1.252186744, -0.200099078, 1.898329160, -0.946711780, -0.100295528, -0.748203859],
    (0, "fan_in 576", 1): [-0.268987179, -1.755287679, -2.423177568, -0.634727927, 0.254856244, -0.411372164],
}


@pytest.mark.parametrize("name", FROZEN_WORDS)
def test_frozen_words(name: tuple[int, str, int]) -> None:
    assert tuple(Stream(*name).words(6).tolist()) == from_hex(FROZEN_WORDS[name])


@pytest.mark.parametrize("name", FROZEN_NORMALS)
def test_frozen_normals(name: tuple[int, str, int]) -> None:
    assert Stream(*name).normal(2, 3).flatten().tolist() == pytest.approx(FROZEN_NORMALS[name], rel=0, abs=1e-6)


def test_frozen_others() -> None:
    assert key_words("fan_in 576") == (0xECBBADE4, 0xD9DDFEFB)
    stream = Stream(1, "others", 2)
    assert stream.signs(10).tolist() == [-1, -1, 1, -1, 1, -1, -1, -1, -1, -1]
    assert stream.integers(100, 8).tolist() == [2, 80, 55, 57, 25, 49, 68, 33]
    assert stream.permutation(8).tolist() == [5, 2, 4, 3, 0, 1, 7, 6]


# Distributions. A bound is five standard deviations of the statistic, from n alone.

NUM_NORMALS = 1 << 20


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_normals_are_standard_normal(seed: int) -> None:
    n = NUM_NORMALS
    x = Stream(seed, "distribution").normal(n).double()
    assert abs(x.mean()) < 5 * math.sqrt(1 / n)
    assert abs(x.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((x**3).mean()) < 5 * math.sqrt(15 / n)
    assert abs((x**4).mean() - 3) < 5 * math.sqrt(96 / n)
    # Kolmogorov and Smirnov: P(sqrt(n) D > 2.5) = 7e-6.
    cdf = 0.5 * (1 + torch.erf(x.sort().values / math.sqrt(2)))
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    distance = torch.maximum(cdf - steps[:-1], steps[1:] - cdf).max()
    assert math.sqrt(n) * distance < 2.5
    assert 4.5 < x.abs().max() < math.sqrt(2 * math.log(2**33))


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    return float((a * b).mean() / (a.std() * b.std()))


def test_normals_are_uncorrelated() -> None:
    n = NUM_NORMALS
    x = Stream(0, "distribution").normal(n)
    others = {
        "lag 1": torch.roll(x, 1),
        "lag 2": torch.roll(x, 2),
        "lag 4": torch.roll(x, 4),
        "seed": Stream(1, "distribution").normal(n),
        "high half of the seed": Stream(1 << 32, "distribution").normal(n),
        "key": Stream(0, "distribution ").normal(n),
        "epoch": Stream(0, "distribution", 1).normal(n),
    }
    for name, other in others.items():
        assert abs(correlation(x, other)) < 5 / math.sqrt(n), name
        assert abs(correlation(x**2, other**2)) < 5 / math.sqrt(n), name


def test_words_have_fair_bits() -> None:
    n = 1 << 16
    words = Stream(0, "bits").words(n)
    for bit in range(32):
        ones = ((words >> bit) & 1).sum().item()
        assert abs(ones - n / 2) < 5 * math.sqrt(n / 4), bit


def test_signs_are_fair() -> None:
    n = 1 << 20
    signs = Stream(0, "signs").signs(n)
    assert signs.dtype == torch.float32
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert abs(signs.sum().item()) < 5 * math.sqrt(n)


def is_uniform(counts: torch.Tensor) -> bool:
    """Pearson's chi squared, less than five of its standard deviations from its mean."""
    expected = counts.sum() / len(counts)
    freedom = len(counts) - 1
    return bool(abs(((counts - expected) ** 2 / expected).sum() - freedom) < 5 * math.sqrt(2 * freedom))


@pytest.mark.parametrize("high", [2, 7, 64, 1000])
def test_integers_are_uniform(high: int) -> None:
    integers = Stream(0, "integers").integers(high, 1 << 20)
    assert integers.min() >= 0
    assert integers.max() < high
    assert is_uniform(torch.bincount(integers, minlength=high).double())


def test_permutations_are_uniform() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for epoch in range(2400):
        order = tuple(Stream(0, "permutations", epoch).permutation(4).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert is_uniform(torch.tensor(list(counts.values()), dtype=torch.float64))


def test_a_long_permutation() -> None:
    n = 100_000
    order = Stream(0, "permutation").permutation(n)
    assert torch.equal(order.sort().values, torch.arange(n))
    assert abs(correlation(order, torch.arange(n))) < 5 / math.sqrt(n)


# A function of (seed, key, epoch, index) and of nothing else.


def draw(stream: Stream) -> list[torch.Tensor]:
    return [
        stream.words(7),
        stream.normal(3, 3),
        stream.signs(5),
        stream.integers(9, 2, 2),
        stream.permutation(6),
    ]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_epoch_may_be_a_tensor() -> None:
    for epoch in (0, 3, 2**32 - 1):
        for dtype in (torch.int64, torch.int32) if epoch < 2**31 else (torch.int64,):
            assert same(draw(Stream(1, "a", epoch)), draw(Stream(1, "a", torch.tensor(epoch, dtype=dtype))))


def test_the_epoch_is_read_when_numbers_are() -> None:
    epoch = torch.tensor(3)
    stream = Stream(1, "a", epoch)
    epoch.fill_(4)
    assert same(draw(stream), draw(Stream(1, "a", 4)))


def test_everything_in_the_address_counts() -> None:
    names = [(1, "a", 0), (2, "a", 0), (1 + 2**32, "a", 0), (1, "b", 0), (1, "a", 1), (1, "a", 2)]
    drawn = [draw(Stream(*name)) for name in names]
    assert same(drawn[0], draw(Stream(*names[0])))
    for kind in range(len(drawn[0]) - 1):  # two permutations of six may coincide
        for i in range(len(names)):
            for j in range(i):
                assert not torch.equal(drawn[i][kind], drawn[j][kind]), (names[i], names[j], kind)


def test_a_shorter_read_is_a_prefix() -> None:
    words, normals = Stream(1, "a").words(1000), Stream(1, "a").normal(1000)
    signs, integers = Stream(1, "a").signs(1000), Stream(1, "a").integers(10, 1000)
    for n in (0, 1, 2, 3, 4, 5, 63, 64, 65, 999):
        assert torch.equal(Stream(1, "a").words(n), words[:n])
        assert torch.equal(Stream(1, "a").signs(n), signs[:n])
        assert torch.equal(Stream(1, "a").integers(10, n), integers[:n])
        # Bit for bit within one engine, whatever the vector length leaves over.
        assert torch.equal(Stream(1, "a").normal(n), normals[:n])
    assert torch.equal(Stream(1, "a").normal(10, 4, 25).flatten(), normals)


def test_two_reads_do_not_overlap() -> None:
    all_at_once = Stream(1, "a").words(28)
    stream = Stream(1, "a")
    assert torch.equal(stream.words(8), all_at_once[:8])
    assert torch.equal(stream.words(5), all_at_once[8:13])
    assert torch.equal(stream.words(4), all_at_once[16:20])  # a read begins at a multiple of four
    assert torch.equal(stream.words(0), all_at_once[:0])
    assert torch.equal(stream.words(8), all_at_once[20:28])
    stream = Stream(1, "a")
    first, second = stream.normal(6), stream.normal(6)
    assert not set(first.tolist()) & set(second.tolist())


def test_the_global_generator_is_neither_read_nor_moved() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = draw(Stream(1, "a"))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert same(draw(Stream(1, "a")), first)


# Compiled.


def words_and_normals(epoch: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """With keys of high and low halves above 2^31, and lengths that leave a rest to the vector loop."""
    stream, other = Stream(2**63 + 7, "compiled", epoch), Stream(2**32 - 1, "compiled", epoch)
    words = torch.cat((stream.words(1001), stream.words(10), other.words(1001)))
    return words, stream.normal(37, 27), stream.signs(10), stream.permutation(65)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_is_eager(backend: str) -> None:
    torch.compiler.reset()
    graphs = 0

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    compiled = torch.compile(words_and_normals, fullgraph=True, backend=counting)
    for epoch in (0, 1, 70_000, 2**32 - 1):
        found, expected = compiled(torch.tensor(epoch)), words_and_normals(torch.tensor(epoch))
        for index in (0, 2, 3):
            assert torch.equal(found[index], expected[index])
        assert (found[1] - expected[1]).abs().max() < 1e-6
    assert graphs == 1


# Errors.


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_outside_64_bits(seed: int) -> None:
    with pytest.raises(ValueError, match=rf"seed={seed}: choose an integer from 0 to 2\*\*64 - 1"):
        Stream(seed, "a")


@pytest.mark.parametrize("high", [-1, 0, 2**31 + 1])
def test_a_range_of_integers_that_does_not_fit(high: int) -> None:
    with pytest.raises(ValueError, match=rf"high={high}: choose from 1 to 2\*\*31"):
        Stream(0, "a").integers(high, 3)


def test_a_stream_ends() -> None:
    stream = Stream(0, "a")
    stream._next_block = 2**32 - 1
    assert stream.words(4).tolist() == list(reference_philox((2**32 - 1, 0, *key_words("a")), (0, 0)))
    with pytest.raises(ValueError, match=r"1 numbers from one stream: at most 2\*\*34"):
        stream.words(1)
