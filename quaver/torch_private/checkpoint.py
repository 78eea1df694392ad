"""The files of torch.distributed.checkpoint.

- `StorageInfo`: torch.distributed.checkpoint.filesystem._StorageInfo, where a tensor stands in the files; metadata has
  one for each. No replacement.
"""

from __future__ import annotations

from torch.distributed.checkpoint.filesystem import _StorageInfo

StorageInfo = _StorageInfo
