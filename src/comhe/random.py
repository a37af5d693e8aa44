"""Random numbers as a function of a counter: Philox4x32-10 (Salmon et al., SC 2011).

There is no generator state. A number is fixed by (seed, key, epoch, index), so every rank draws the same basis without
communication, resuming needs the round alone, and any step can be replayed. The layout of the counter is frozen by
tests/test_random.py: every published number depends on it.

    Philox key      (seed low 32 bits, seed high 32 bits)
    Philox counter  (block index, epoch, first and second word of blake2b(key, 8 bytes))
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
# Less 2^32, so that the product with a word fits signed 64 bits: compiled code goes wrong where it overflows.
_MULTIPLIERS = (0xD2511F53 - 2**32, 0xCD9E8D57 - 2**32)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Four words of 32 bits, held in int64, for each counter of four such words."""
    c0, c1, c2, c3 = (word.clone() for word in counter)
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The low half is that of the full product, the high half lacks the word itself. In place: half the time is
        # that of memory.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c2 += p1 >> 32
        c2 ^= c1
        c2 ^= k0
        c0 += p0 >> 32
        c0 ^= c3
        c0 ^= k1
        c0, c1, c2, c3 = c2, p1.bitwise_and_(_MASK), c0, p0.bitwise_and_(_MASK)
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def key_words(key: str) -> tuple[int, int]:
    """The two counter words that a key's name stands for."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


class Stream:
    """The numbers of one (seed, key, epoch), read from the beginning.

    `epoch` may be a tensor on `device`: a captured graph then draws new numbers whenever that tensor changes.
    Two reads of one stream do not overlap; a read begins at a multiple of four words.
    """

    def __init__(self, seed: int, key: str, epoch: int | Tensor = 0, device: torch.device | str | None = None) -> None:
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed={seed}: choose an integer from 0 to 2**64 - 1")
        self.device = torch.device(device) if device is not None else torch.device("cpu")
        self._key = (seed & _MASK, seed >> 32)
        self._name = key_words(key)
        self._epoch = epoch
        self._next_block = 0

    def words(self, count: int) -> Tensor:
        """`count` words of 32 bits as int64, in the order of the counter."""
        return torch.stack(self._blocks(count), dim=-1).view(-1)[:count]

    def normal(self, *shape: int) -> Tensor:
        """Standard normals in float32 by Box and Muller, two from each pair of words."""
        count = math.prod(shape)
        words = self._blocks(count)
        normals = []
        for first, second in (words[:2], words[2:]):
            # Half a step keeps the logarithm's argument above zero: the largest normal is sqrt(2 log 2^33) = 6.76.
            radius = first.float().add_(0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
            angle = second.float().mul_(2.0 * math.pi * 2.0**-32)
            normals += [angle.cos().mul_(radius), angle.sin().mul_(radius)]
        return torch.stack(normals, dim=-1).view(-1)[:count].view(shape)

    def signs(self, *shape: int) -> Tensor:
        """Independent fair signs, +1 or -1, in float32."""
        return 1.0 - 2.0 * (self.words(math.prod(shape)) >> 31).view(shape).float()

    def integers(self, high: int, *shape: int) -> Tensor:
        """Integers from 0 to high - 1, the bias below high / 2^32."""
        if not 1 <= high <= 2**31:
            raise ValueError(f"high={high}: choose from 1 to 2**31")
        return ((self.words(math.prod(shape)) * high) >> 32).view(shape)

    def permutation(self, length: int) -> Tensor:
        """A random order of 0 .. length - 1."""
        return torch.argsort(self.words(length), stable=True)

    def _blocks(self, count: int) -> tuple[Tensor, ...]:
        """Of each block of four words the first, second, third and fourth."""
        num_blocks = (count + 3) // 4
        if self._next_block + num_blocks > 2**32:
            raise ValueError(f"{count} numbers from one stream: at most 2**34 fit its counter")
        index = torch.arange(self._next_block, self._next_block + num_blocks, dtype=torch.int64, device=self.device)
        # The mask changes no value. Without it the compiler folds multiples of the index into an address, and
        # holds the steps of that in 32 bits.
        index = index & _MASK
        self._next_block += num_blocks
        if isinstance(self._epoch, Tensor):
            epoch = (self._epoch & _MASK).expand_as(index)
        else:
            epoch = torch.full_like(index, self._epoch & _MASK)
        fixed = (torch.full_like(index, word) for word in self._name)
        return philox((index, epoch, *fixed), self._key)  # type: ignore[arg-type]
