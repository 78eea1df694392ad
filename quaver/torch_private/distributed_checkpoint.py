"""The files of torch.distributed.checkpoint.

- `StorageInfo`: torch.distributed.checkpoint.filesystem._StorageInfo, the position of a tensor in the files, in the
  metadata. No replacement.
"""

from __future__ import annotations

from torch.distributed.checkpoint.filesystem import _StorageInfo

StorageInfo = _StorageInfo
