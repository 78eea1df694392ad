"""Lets Inductor write code for a GPU that this machine lacks, and records its launches instead of running it.

A torch build without CUDA cannot differentiate fake CUDA tensors, because autograd queries the device's streams in C++.
Inductor does not differentiate. So the model is traced and partitioned into forward and backward with fake CPU tensors,
on which quaver runs its GPU code (quaver/lab/memory/devices/gpu.py). Each graph moves to the GPU when Inductor gets it.
From there on every decision is as on the GPU: fusion, layouts, splits of reductions, kernels in Triton. No kernel is
compiled.

In the trace torch's C++ still decides as for a CPU. Attention is pinned to the kernel that torch uses on the GPU
(quaver/roofline/attention.py). Autocast is the CPU's, which differs from CUDA's in pow, rsqrt and sums; quaver's blocks
compute these in float32 anyway. docs/design/0017 has the alternatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch._inductor.scheduler
import torch.nn.functional as F
import torch.utils._triton
from torch import Tensor, fx
from torch._dynamo import device_interface
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx
from torch._inductor.codecache import CacheBase
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.utils import Placeholder
from torch._inductor.virtualized import V
from torch.fx.node import map_aggregate

from quaver.lab.bench.ledger.launches import CompiledGraph, TritonKernel, read_graph
from quaver.roofline.attention import CUDNN, choose_attention_kernel
from quaver.torch_private.inductor import disable_caches
from quaver.torch_private.replacing import replace_attribute

_DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True)
class GpuProperties:
    """The properties of a GPU that Inductor reads.

    They are from the tables of compute capabilities in NVIDIA's CUDA C++ Programming Guide, and from the data sheets of
    H100 SXM5, H200 SXM and B200.
    """

    name: str
    major: int
    minor: int
    multi_processor_count: int
    L2_cache_size: int
    total_memory: int
    clock_hz: float
    """The clock of the data sheet's bfloat16 FLOP/s, at 4096 FLOPs per multiprocessor and cycle (8192 on Blackwell)."""
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    warp_size: int = 32
    shared_memory_per_block_optin: int = 232448

    @property
    def capability(self) -> int:
        """The compute capability as one number, 90 for 9.0."""
        return 10 * self.major + self.minor


GPU_PROPERTIES = {
    "H100": GpuProperties("NVIDIA H100 80GB HBM3", 9, 0, 132, 50 * 2**20, 80 * 2**30, 1.83e9),
    "H200": GpuProperties("NVIDIA H200", 9, 0, 132, 50 * 2**20, 141 * 2**30, 1.83e9),
    "B200": GpuProperties("NVIDIA B200", 10, 0, 148, 126 * 2**20, 180 * 2**30, 1.86e9),
}


class _CompilationRecorded(Exception):
    """Ends the call of code that was compiled to be recorded."""


def record_compiled(call: Callable[[], object], gpu: GpuProperties) -> list[CompiledGraph]:
    """Call code that compiles a forward and its backward for `gpu`, and return both graphs, the forward first.

    Fake tensors must be on, under `simulate_float8_gpu` (quaver/lab/memory/devices/gpu.py). Code that was compiled
    before is compiled again at its next call ([Note: reset] in compiled.py).

    Raises:
        NotImplementedError: `call` compiles anything else, or nothing.
    """
    torch.compiler.reset()
    try:
        with _record_graphs(gpu) as graphs, suppress(_CompilationRecorded):
            call()
    finally:
        torch.compiler.reset()
    if [graph.is_backward for graph in graphs] != [False, True]:
        compiled = " and ".join("a backward" if graph.is_backward else "a forward" for graph in graphs) or "nothing"
        raise NotImplementedError(f"expected code that compiles one forward and one backward, got {compiled}")
    return graphs


@contextmanager
def _record_graphs(gpu: GpuProperties) -> Iterator[list[CompiledGraph]]:
    graphs: list[CompiledGraph] = []
    kernels: list[TritonKernel] = []
    define = TritonScheduling.define_kernel

    def define_kernel(scheduling: Any, source: str, schedule: Any, kernel: Any) -> str:
        name = define(scheduling, source, schedule, kernel)
        buffers = {**kernel.args.input_buffers, **kernel.args.output_buffers}
        pointers = {buffer: str(pointer) for buffer, pointer in buffers.items()}
        in_place = kernel.args.inplace_buffers.items()  # removed buffers are markers without a name
        pointers |= {buffer: str(arg.inner_name) for buffer, arg in in_place if hasattr(arg, "inner_name")}
        source = source.replace(str(Placeholder.KERNEL_NAME), name)
        kernels.append(TritonKernel(name, source, pointers, id(V.graph.scheduler.current_node)))
        return name

    def record(graph: Any, wrapper_code: Any) -> ModuleType:
        graphs.append(read_graph(graph, kernels, wrapper_code.value))
        kernels.clear()
        module = ModuleType("quaver.lab.bench.ledger.recorded_code")
        module.__file__ = f"<{graph.graph_id}: recorded>"

        def call(arguments: object) -> None:
            raise _CompilationRecorded

        vars(module)["call"] = call
        return module

    with ExitStack() as stack:
        stack.enter_context(disable_caches())
        stack.enter_context(torch._functorch.config.patch(force_non_lazy_backward_lowering=True))
        stack.enter_context(compile_for_gpu(gpu))
        stack.enter_context(replace_attribute(TritonScheduling, "define_kernel", define_kernel))
        stack.enter_context(replace_attribute(GraphLowering, "_compile_to_module_lines", record))
        yield graphs


@contextmanager
def compile_for_gpu(gpu: GpuProperties) -> Iterator[None]:
    """Let torch.compile compile graphs of CPU tensors for `gpu` inside the block."""
    device_interface.get_interface_for_device("cpu")  # registers the devices that torch was built for
    compile_graph = compile_fx._InProcessFxCompile.codegen_and_compile

    def compile_moved(compiler: Any, graph: fx.GraphModule, inputs: Sequence[Any], *options: Any) -> Any:
        return compile_graph(compiler, graph, _move_graph(graph, inputs), *options)

    with ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(replace_attribute(owner, name, value))

        replace(compile_fx._InProcessFxCompile, "codegen_and_compile", compile_moved)
        interfaces = {**device_interface.device_interfaces, "cuda": _make_interface(gpu)}
        replace(device_interface, "device_interfaces", interfaces)
        replace(torch._inductor.scheduler, "has_triton", lambda: True)
        replace(torch.utils._triton, "triton_hash_with_backend", lambda: "")  # for caches, which are off
        replace(CacheBase, "get_system", staticmethod(lambda: {"hash": ""}))
        replace(torch.cuda, "get_device_properties", lambda device=None: gpu)
        replace(torch.cuda, "get_device_capability", lambda device=None: (gpu.major, gpu.minor))
        replace(torch.cuda, "current_device", lambda: 0)
        replace(torch.cuda, "is_available", lambda: False)  # otherwise Inductor times matmuls and enters the device
        replace(Tensor, "copy_", _copy_)
        replace(F, "scaled_dot_product_attention", _make_attention(choose_attention_kernel(gpu.capability)))
        _forget_devices()
        try:
            yield
        finally:
            _forget_devices()


def _forget_devices() -> None:
    DeviceProperties.create.cache_clear()
    CacheBase.get_local_cache_path.cache_clear()


def _move_graph(graph: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Let a graph allocate its tensors on the GPU, and return fake inputs there."""
    for module in graph.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                node.args, node.kwargs = map_aggregate((node.args, node.kwargs), _move_device)
    mode = detect_fake_mode(inputs)
    return [_move_tensor(value, mode) if isinstance(value, Tensor) else value for value in inputs]


def _move_device(argument: Any) -> Any:
    return _DEVICE if isinstance(argument, torch.device) else argument


def _move_tensor(tensor: Tensor, mode: Any) -> Tensor:
    with mode, torch.no_grad():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_DEVICE)


def _copy_(tensor: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Run `Tensor.copy_` without its Python binding, which queries the device's streams before it dispatches."""
    return torch.ops.aten.copy_.default(tensor, source, non_blocking)


def _make_attention(kernel: str) -> Callable[..., Tensor]:
    """Make a torch.nn.functional.scaled_dot_product_attention that calls a GPU's kernel.

    For CPU tensors C++ would choose a CPU's. It raises NotImplementedError for a mask, whose work is not counted and
    which flash attention does not take.
    """
    aten = torch.ops.aten
    is_cudnn = kernel == CUDNN
    attend = aten._scaled_dot_product_cudnn_attention if is_cudnn else aten._scaled_dot_product_flash_attention
    options = (None, True) if is_cudnn else ()  # no bias, and return the log-sum-exps, which the backward reads

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None:
            raise NotImplementedError("expected attention without a mask, whose work is not counted")
        return attend(query, key, value, *options, dropout_p, is_causal, scale=scale)[0]

    return attention


def _make_interface(gpu: GpuProperties) -> type[device_interface.DeviceInterface]:

    class _Worker:
        current_device = staticmethod(lambda: 0)
        get_device_properties = staticmethod(lambda device=None: gpu)

    class _Gpu(device_interface.DeviceInterface):
        Worker: Any = _Worker
        is_available = staticmethod(lambda: True)
        device_count = staticmethod(lambda: 1)
        current_device = staticmethod(lambda: 0)
        get_device_properties = staticmethod(lambda device=None: gpu)
        get_compute_capability = staticmethod(lambda device=None: gpu.capability)
        is_triton_capable = staticmethod(lambda device=None: True)
        is_bf16_supported = staticmethod(lambda including_emulation=False: True)
        get_raw_stream = staticmethod(lambda device_idx: 0)

    return _Gpu
