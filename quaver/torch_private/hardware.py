"""Instruction sets of the CPU, and the float8 matmuls of GPUs.

- `has_amx_tiles()`, `has_avx512_bfloat16()`: torch.cpu._is_amx_tile_supported and _is_avx512_bf16_supported. Both read
  the public torch.cpu.get_capabilities(). Remove when PyTorch documents its keys.
- `onednn_has_bfloat16()`: torch.ops.mkldnn._is_mkldnn_bf16_supported. No replacement.
- `scaled_mm(...)`: torch._scaled_mm. torch.nn.functional.scaled_mm is public since torch 2.10, but Inductor's
  templates, the FLOP counter and recomputation policies know only this operation (torch 2.11 and 2.13).
- `grouped_mm(...)`, `scaled_grouped_mm(...)`: torch._grouped_mm and _scaled_grouped_mm. The second has no public
  counterpart with a meta kernel; torch.nn.functional.grouped_mm replaces the first when torch 2.10 is the oldest.
"""

from __future__ import annotations

import torch

has_amx_tiles = torch.cpu._is_amx_tile_supported
has_avx512_bfloat16 = torch.cpu._is_avx512_bf16_supported
onednn_has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported
scaled_mm = torch._scaled_mm
grouped_mm = torch._grouped_mm
scaled_grouped_mm = torch._scaled_grouped_mm
