"""The order of sequences in an epoch: a permutation that is computed, not stored.

A Feistel network of 8 rounds permutes the 4^h numbers of 2h bits. Numbers that fall outside the sequences are sent
through it again until they fall inside ("cycle walking"): on average fewer than 64 times, and fewer than 4 with 16 or
more sequences. Every round's key comes from the sha512 of seed and epoch, and its function is the finalizer of
splitmix64 (Steele, Lea and Flood, 2014). The order is made of integer arithmetic alone, so it is the same on every
machine and with every release of NumPy. Memory: 64 bytes of keys per epoch and about 150 bytes per requested number,
independent of the number of sequences.
"""

import hashlib
from typing import Any

import numpy as np

Int64Array = np.ndarray[Any, np.dtype[np.int64]]
UInt64Array = np.ndarray[Any, np.dtype[np.uint64]]

FEISTEL_ROUNDS = 8
MIN_HALF_BITS = 3
"""A network with fewer bits in a half produces too few of the possible orders."""


def compute_stream_indices(first: int, length: int, epoch_len: int, seed: int) -> Int64Array:
    """Return the indices of the sequences at positions `first` to `first + length - 1` of the endless stream.

    Position k belongs to epoch k // epoch_len. Each epoch has every sequence once, in a different order.

    Args:
        first: not negative.
        epoch_len: the number of sequences in an epoch, at least 1.
    Returns:
        int64 [length].
    """
    numbers = np.arange(first, first + length, dtype=np.int64)
    epochs, positions = np.divmod(numbers, epoch_len)
    distinct_epochs, epoch_index = np.unique(epochs, return_inverse=True)
    keys = np.stack([_derive_keys(seed, int(epoch)) for epoch in distinct_epochs], axis=1)[:, epoch_index]
    half_bits = max(MIN_HALF_BITS, -(-(epoch_len - 1).bit_length() // 2))
    result = _permute(positions.astype(np.uint64), keys, half_bits)
    while (outside := np.flatnonzero(result >= epoch_len)).size:
        result[outside] = _permute(result[outside], keys[:, outside], half_bits)
    return result.astype(np.int64)


def _derive_keys(seed: int, epoch: int) -> UInt64Array:
    digest = hashlib.sha512(f"quaver order {seed} {epoch}".encode()).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _permute(numbers: UInt64Array, keys: UInt64Array, half_bits: int) -> UInt64Array:
    """Send `numbers` [n] through the rounds, with `keys` [FEISTEL_ROUNDS, n]."""
    shift, mask = np.uint64(half_bits), np.uint64(2**half_bits - 1)
    left, right = numbers >> shift, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << shift) | right


def _mix(words: UInt64Array) -> UInt64Array:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
