"""The arithmetic of torch.optim.Muon.

- `zeropower_via_newtonschulz`, `adjust_lr`: torch.optim._muon._zeropower_via_newtonschulz and _adjust_lr, so that
  Float8Muon computes the same matrices and learning rates as torch.optim.Muon. No replacement.
"""

from __future__ import annotations

import torch.optim._muon as muon

zeropower_via_newtonschulz = muon._zeropower_via_newtonschulz
adjust_lr = muon._adjust_lr
