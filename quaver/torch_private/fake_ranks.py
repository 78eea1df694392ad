"""A process group of many ranks in one process.

- `FakeStore`: torch.testing._internal.distributed.fake_pg.FakeStore, for `init_process_group("fake", store=...)`, whose
  collectives move no data. Importing it registers the backend. No replacement.
"""

from __future__ import annotations

from torch.testing._internal.distributed import fake_pg

FakeStore = fake_pg.FakeStore
