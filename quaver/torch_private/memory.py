"""Storages, and the history of the CUDA allocator. No replacements.

- `storage_key(storage)`: UntypedStorage._cdata, one number for all Python objects of a storage. data_ptr() is 0 for
  every storage without memory.
- `record_memory_history(...)` and `dump_snapshot(file)`: torch.cuda.memory._record_memory_history and _dump_snapshot,
  which PyTorch documents.
"""

from __future__ import annotations

from operator import attrgetter

import torch

storage_key = attrgetter("_cdata")
record_memory_history = torch.cuda.memory._record_memory_history
dump_snapshot = torch.cuda.memory._dump_snapshot
