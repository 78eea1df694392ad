"""One process as one rank of many, without the others.

- `FakeStore`: torch.testing._internal.distributed.fake_pg.FakeStore, for `init_process_group("fake", store=...)`, whose
  collectives move nothing. Its import registers the backend. No replacement.
"""

from __future__ import annotations

from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["FakeStore"]
