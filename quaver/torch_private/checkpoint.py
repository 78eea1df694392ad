"""The files of torch.distributed.checkpoint, and the frames of torch.utils.checkpoint.

- `StorageInfo`: torch.distributed.checkpoint.filesystem._StorageInfo, where a tensor stands in the files; metadata has
  one for each. No replacement.
- `frame_of(hooks)`: what the hooks of torch.utils.checkpoint close over, `frame` in a forward and `target_frame_ref` in
  its recomputation. No replacement.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo

StorageInfo = _StorageInfo


def frame_of(hooks: Any) -> tuple[Any, bool] | None:
    """The frame of a non-reentrant checkpoint whose (pack, unpack) hooks are these, and whether it is recomputed now.

    One forward has one frame, which lives until its graph is gone. None where torch closes over something else.
    """
    pack = inspect.unwrap(hooks[0])
    cells = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True))
    if "target_frame_ref" in cells:
        return cells["target_frame_ref"].cell_contents(), True
    return (cells["frame"].cell_contents, False) if "frame" in cells else None
