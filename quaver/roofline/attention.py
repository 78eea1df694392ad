"""Predicts which kernel torch's attention uses on a GPU, and the time of causal attention with it.

`torch.nn.functional.scaled_dot_product_attention` tries cuDNN first if `check_prefer_cudnn_attention` returns true
(aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), otherwise FlashAttention-2:

    compute capability 9.0, 10.x   cuDNN newer than 9.15. The default wheels of PyTorch 2.11 have 9.19, 2.13 9.20 and
                                   2.14 9.24; 2.15 has the same rule; 2.10 has the rule and an older cuDNN
    others (8.0, 8.9, 12.x)        FlashAttention-2
    cuDNN supports                 heads of at most 128 features, a multiple of 8, fewer heads of keys, and masks;
                                   deterministic algorithms use FlashAttention-2
    TORCH_CUDNN_SDPA_DEPRIORITIZED=1 gives FlashAttention-2, and so do wheels for CUDA 12, whose cuDNN is older.

A kernel's rate is `best_tflops * seq_len / (seq_len + half_rate_seq_len)`, because short sequences leave
multiprocessors idle. FLOPs are counted as in quaver/roofline/block.py. The rates fit these sources within 5%, for heads
of 128 and sequences of 2k to 32k tokens (FlashAttention: 1k to 16k):

flash, H100    FlashAttention-2: forward 260 to 335, both directions 221 to 328 TFLOP/s (Dao-AILab/flash-attention,
               assets/flash3_fp16_fwd.png and flash2_h100_fwd_bwd_benchmark.png)
flash, A100    "50-73% of the theoretical maximum" (arXiv 2307.08691, abstract): 60%, the share for causal attention
cudnn, H200    cuDNN 9.19: forward 484 to 688, backward 370 to 581 (NVIDIA/cudnn-frontend,
               benchmark/sdpa_benchmark_training); assumed for an H100
cudnn, B200    cuDNN 9.22 on a GB200: forward 1408 (4k) to 1622, backward 1148 to 1226

Other devices have ATTENTION_SHARE of the data sheet's rate.
"""

from __future__ import annotations

from typing import NamedTuple

from quaver.roofline.block import ATTENTION_MATMULS, PerPass
from quaver.roofline.cost import KERNEL_LAUNCH_S
from quaver.roofline.device_specs import DeviceSpec

FLASH, CUDNN = "flash", "cudnn"

ATTENTION_SHARE = 0.35
"""Share of the data sheet's bfloat16 rate for kernels of unknown rate: FlashAttention-2's on an H100 ("35%
utilization", arXiv 2407.08608, abstract)."""


class AttentionRate(NamedTuple):
    """The TFLOP/s for long sequences, and the sequence length with half of this rate."""

    best_tflops: float
    half_rate_seq_len: float

    def compute_tflops(self, seq_len: int) -> float:
        """Return the TFLOP/s for sequences of this length."""
        return self.best_tflops * seq_len / (seq_len + self.half_rate_seq_len)


_FLASH_H100 = AttentionRate(340, 290), AttentionRate(320, 480)
_FLASH_A100 = AttentionRate(0.6 * 312, 0), AttentionRate(0.6 * 312, 0)
_CUDNN_H200 = AttentionRate(700, 800), AttentionRate(600, 1100)
_CUDNN_B200 = AttentionRate(1700, 800), AttentionRate(1400, 800)
ATTENTION_RATES = {
    (FLASH, "H100"): _FLASH_H100,
    (FLASH, "H200"): _FLASH_H100,
    **{(FLASH, name): _FLASH_A100 for name in ("A100", "A100-40GB", "A100-PCIe")},
    (CUDNN, "H100"): _CUDNN_H200,
    (CUDNN, "H200"): _CUDNN_H200,
    (CUDNN, "B200"): _CUDNN_B200,
    (CUDNN, "GB200"): _CUDNN_B200,
}
"""The rates of forward and backward, by kernel and device."""


def choose_attention_kernel(compute_capability: int | None) -> str:
    """Return the kernel of torch's attention for heads of at most 128 features: FLASH or CUDNN.

    Args:
        compute_capability: 90 for 9.0; None for GPUs of other vendors.
    """
    return CUDNN if (compute_capability or 0) // 10 in (9, 10) else FLASH


def get_attention_rates(spec: DeviceSpec, kernel: str | None = None) -> tuple[AttentionRate, AttentionRate]:
    """Return the rates of the forward and of the backward.

    Args:
        spec: the device.
        kernel: FLASH or CUDNN; None for torch's choice.
    """
    default = AttentionRate(spec.bfloat16_tflops * ATTENTION_SHARE, 0)
    kernel = kernel or choose_attention_kernel(spec.compute_capability)
    return ATTENTION_RATES.get((kernel, spec.name), (default, default))


def predict_attention_seconds(
    queries: int, tokens: float, seq_len: int, spec: DeviceSpec, kernel: str | None = None
) -> PerPass:
    """Predict the seconds of causal attention, which skips the masked half.

    Args:
        queries: the features of all query heads.
        tokens: the tokens of all sequences.
        seq_len: the tokens of a sequence.
        spec, kernel: as for `get_attention_rates`.
    """
    matmul = queries * seq_len * tokens  # 2 FLOPs for half of the scores
    rates = [1e12 * rate.compute_tflops(seq_len) for rate in get_attention_rates(spec, kernel)]
    pairs = zip(ATTENTION_MATMULS.values(), rates, strict=True)
    return PerPass(*(matmuls * matmul / rate + KERNEL_LAUNCH_S for matmuls, rate in pairs))
