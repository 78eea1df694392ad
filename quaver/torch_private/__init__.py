"""The private names of PyTorch that quaver relies on: a file per subject, a public-looking name for each.

| file | subject |
|---|---|
| `autograd` | the node that runs, what its backward frees, who packs saved tensors, forward-mode levels |
| `dispatch` | the stacks of modes and transforms, dispatch keys, operator classes |
| `tracing` | the jit tracer, the compiler's context, fake tensors |
| `compiler` | compiled modules, the compiler's settings |
| `versions` | version counters |
| `dtensor` | the local tensor of a DTensor |
| `nested` | the ragged dim of a nested tensor |
| `fsdp` | where FSDP2 issues its collectives, and that checkpoints do not count them |
| `policies` | selective activation checkpoints |
| `collectives` | functional collectives |
| `checkpoint` | the files of torch.distributed.checkpoint |
| `fake_ranks` | one process as one rank of many |
| `profiler` | named ranges, events |
| `memory` | identities of storages, the CUDA allocator's history |
| `optimizer` | hooks of state dicts |
| `muon` | Newton-Schulz and learning rates of torch.optim.Muon |
| `hardware` | instructions of the CPU, the float8 matmul of GPUs |

Each file begins with its names, what they are for, and when they can go; "no replacement" means that torch 2.14 has no
public one. tests/library/test_torch_private.py fails where a name disappears or changes, and where a private name
stands elsewhere. Names that a linear asks at each call are PyTorch's own C functions: a wrapper would cost a call.

Used directly: `TorchDispatchMode`, `is_traceable_wrapper_subclass` and `tree_*` of torch.utils._python_dispatch and
_pytree, and operators of torch.ops.aten whose names begin with an underscore. Two places stay their own:
quaver/runtime/phases.py reads a flag of the profiler, which a call would make slower, and quaver/lab/memory/faking and
compiling replace parts of fake tensors and of Inductor.
"""
