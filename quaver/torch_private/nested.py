"""Nested tensors.

- `ragged_dim(tensor)`: NestedTensor._ragged_idx, the dim of a jagged tensor whose length varies. No replacement.
"""

from __future__ import annotations

from operator import attrgetter

ragged_dim = attrgetter("_ragged_idx")
