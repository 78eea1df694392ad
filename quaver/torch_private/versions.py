"""Version counters. In-place operations increment them; writes by numpy, `.data`, shared memory and CUDA graphs do not.

- `get_version(tensor)`: Tensor._version. RuntimeError for inference tensors. No replacement.
- `keep_versions(tensors)`: torch.autograd.grad_mode._unsafe_preserve_version_counter, a context in which writes do not
  change the counters. No replacement.
"""

from __future__ import annotations

from operator import attrgetter

from torch.autograd.grad_mode import _unsafe_preserve_version_counter

get_version = attrgetter("_version")
keep_versions = _unsafe_preserve_version_counter
