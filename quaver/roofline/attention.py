"""The kernel that torch's attention takes on a GPU, and the seconds of causal attention by it.

`torch.nn.functional.scaled_dot_product_attention` tries cuDNN first where `check_prefer_cudnn_attention` says so (aten/
src/ATen/native/transformers/cuda/sdp_utils.cpp), FlashAttention-2 first elsewhere:

    compute capability 9.0, 10.x   cuDNN, if it is newer than 9.15: PyTorch 2.11 has 9.19, 2.13 9.20, 2.14 9.24 in its
                                   default wheels, and 2.15 the same rule; 2.10 has the rule and an older cuDNN
    others (8.0, 8.9, 12.x)        FlashAttention-2
    cuDNN takes                    heads of at most 128 features, a multiple of 8, fewer heads of keys, masks; nothing
                                   where deterministic algorithms are asked for: FlashAttention-2 then
    TORCH_CUDNN_SDPA_DEPRIORITIZED=1 gives FlashAttention-2, and so do wheels for CUDA 12, whose cuDNN is older.

A kernel's rate is `best * seq_len / (seq_len + half)`: short sequences leave multiprocessors without work. FLOPs are
counted as in quaver/roofline/block.py. Fitted within 5% to, for 2k (FlashAttention: 1k) to 32k (16k) tokens and heads
of 128:

flash, H100    FlashAttention-2: forward 260 to 335, both directions 221 to 328 TFLOP/s (Dao-AILab/flash-attention,
               assets/flash3_fp16_fwd.png and flash2_h100_fwd_bwd_benchmark.png)
flash, A100    "50-73% of the theoretical maximum" (arXiv 2307.08691, abstract): 60%, the share of causal ones
cudnn, H200    cuDNN 9.19: forward 484 to 688, backward 370 to 581 (NVIDIA/cudnn-frontend,
               benchmark/sdpa_benchmark_training); assumed for an H100
cudnn, B200    cuDNN 9.22 on a GB200: forward 1408 (4k) to 1622, backward 1148 to 1226

Others: ATTENTION_SHARE of the data sheet.
"""

from __future__ import annotations

from typing import NamedTuple

from quaver.roofline.block import ATTENTION_MATMULS, Both
from quaver.roofline.cost import KERNEL_LAUNCH_S
from quaver.roofline.device_specs import DeviceSpec

FLASH, CUDNN = "flash", "cudnn"

ATTENTION_SHARE = 0.35
"""Share of the data sheet's bfloat16 rate of kernels whose rate is not known: what FlashAttention-2 reaches on an H100
("35% utilization", arXiv 2407.08608, abstract)."""


class Rate(NamedTuple):
    """TFLOP/s of long sequences, and the length at which half of them are reached."""

    best: float
    half: float

    def tflops(self, seq_len: int) -> float:
        """The rate at a length."""
        return self.best * seq_len / (seq_len + self.half)


_FLASH_H100 = Rate(340, 290), Rate(320, 480)
_FLASH_A100 = Rate(0.6 * 312, 0), Rate(0.6 * 312, 0)
_CUDNN_H200 = Rate(700, 800), Rate(600, 1100)
_CUDNN_B200 = Rate(1700, 800), Rate(1400, 800)
RATES = {
    (FLASH, "H100"): _FLASH_H100,
    (FLASH, "H200"): _FLASH_H100,
    **{(FLASH, name): _FLASH_A100 for name in ("A100", "A100-40GB", "A100-PCIe")},
    (CUDNN, "H100"): _CUDNN_H200,
    (CUDNN, "H200"): _CUDNN_H200,
    (CUDNN, "B200"): _CUDNN_B200,
    (CUDNN, "GB200"): _CUDNN_B200,
}
"""By kernel and device: forward and backward."""


def kernel_of(compute_capability: int | None) -> str:
    """The kernel that torch's attention takes, for heads of at most 128 features: FLASH or CUDNN.

    Args:
        compute_capability: 90 for 9.0; None for GPUs of other vendors.
    """
    return CUDNN if (compute_capability or 0) // 10 in (9, 10) else FLASH


def rates_of(spec: DeviceSpec, kernel: str | None = None) -> tuple[Rate, Rate]:
    """The rates of the forward and of the backward.

    Args:
        kernel: FLASH or CUDNN; None for the one that torch takes.
    """
    other = Rate(spec.bfloat16_tflops * ATTENTION_SHARE, 0)
    return RATES.get((kernel or kernel_of(spec.compute_capability), spec.name), (other, other))


def attention_seconds(queries: int, tokens: float, seq_len: int, spec: DeviceSpec, kernel: str | None = None) -> Both:
    """The seconds of attention for so many tokens in sequences of `seq_len`, `queries` features of all heads wide.

    It is causal and skips the masked half.

    Args:
        kernel: as for `rates_of`.
    """
    matmul = queries * seq_len * tokens  # 2 FLOPs for half of the scores
    pairs = zip(ATTENTION_MATMULS.values(), rates_of(spec, kernel), strict=True)
    return Both(*(number * matmul / (1e12 * rate.tflops(seq_len)) + KERNEL_LAUNCH_S for number, rate in pairs))
