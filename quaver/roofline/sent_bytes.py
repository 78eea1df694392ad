"""The bytes that a rank sends in a collective: (n - 1) / n of a tensor among n ranks; twice that in an all-reduce.

This holds for ring algorithms, and for an all-to-all of equal parts.
"""

RING_PASSES = {"all_reduce": 2}
"""How often a collective goes around the ring, if not once: an all-reduce is a reduce-scatter and an all-gather."""


def count_sent_bytes(kind: str, tensor_bytes: float, num_ranks: int) -> float:
    """Return the bytes that each of `num_ranks` sends.

    Args:
        kind: all_gather, reduce_scatter, all_reduce or all_to_all.
        tensor_bytes: bytes of the whole tensor; in an all-to-all, of a rank's input, including the part it keeps.
    """
    return RING_PASSES.get(kind, 1) * tensor_bytes * (num_ranks - 1) / num_ranks
