"""The seconds of causal attention by its kernel, its device and the length of the sequence.

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

from quaver.roofline.block import ATTENTION_MATMULS, ATTENTION_SHARE, Both
from quaver.roofline.cost import KERNEL_LAUNCH_S
from quaver.roofline.device_specs import DeviceSpec


class Rate(NamedTuple):
    """TFLOP/s of long sequences, and the length at which half of them are reached."""

    best: float
    half: float

    def tflops(self, seq_len: int) -> float:
        """The rate at a length."""
        return self.best * seq_len / (seq_len + self.half)


_FLASH_H100 = Rate(340, 290), Rate(320, 480)
_CUDNN_H200 = Rate(700, 800), Rate(600, 1100)
RATES = {
    ("flash", "H100"): _FLASH_H100,
    ("flash", "H200"): _FLASH_H100,
    ("flash", "A100"): (Rate(0.6 * 312, 0), Rate(0.6 * 312, 0)),
    ("cudnn", "H100"): _CUDNN_H200,
    ("cudnn", "H200"): _CUDNN_H200,
    ("cudnn", "B200"): (Rate(1700, 800), Rate(1400, 800)),
}
"""By kernel and device: forward and backward."""


def attention_seconds(queries: int, tokens: float, seq_len: int, spec: DeviceSpec, kernel: str = "flash") -> Both:
    """The seconds of attention for so many tokens in sequences of `seq_len`, `queries` features of all heads wide.

    Args:
        kernel: "flash", which torch takes before Blackwell, or "cudnn", which TransformerEngine takes, and torchtitan
            on a B200.
    """
    every = Rate(spec.bfloat16_tflops * ATTENTION_SHARE, 0)
    rates = RATES.get((kernel, spec.name), (every, every))
    matmul = queries * seq_len * tokens  # 2 FLOPs for half of the scores
    return Both(
        *(
            ATTENTION_MATMULS[is_backward] * matmul / (1e12 * rates[is_backward].tflops(seq_len)) + KERNEL_LAUNCH_S
            for is_backward in (False, True)
        )
    )
