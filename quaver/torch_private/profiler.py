"""Ranges and events of the profiler. No replacements.

- `named_range(name)`: torch._C._profiler._RecordFunctionFast, a range that is not an operator, unlike
  torch.profiler.record_function.
- `EventType`: torch._C._profiler._EventType, for the events of `profile().profiler.kineto_results`.
- `DeviceType`: torch._C._autograd.DeviceType, for the events of `profile().events()`.
"""

from __future__ import annotations

import torch

named_range = torch._C._profiler._RecordFunctionFast
EventType = torch._C._profiler._EventType
DeviceType = torch._C._autograd.DeviceType
