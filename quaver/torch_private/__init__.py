"""The private names of PyTorch that quaver uses, each under a public name, one file per subject.

| file | subject |
|---|---|
| `autograd` | the running node, what its backward frees, hooks that pack saved tensors, forward-mode levels |
| `dispatch` | the stacks of modes and transforms, dispatch keys, operator classes |
| `tracing` | the jit tracer, the compiler's context, fake tensors |
| `compiler` | compiled modules, the compiler's settings |
| `inductor` | the code that Inductor generates, its caches |
| `versions` | version counters |
| `dtensor` | the local tensor of a DTensor |
| `nested` | the ragged dim of a nested tensor |
| `fsdp` | where FSDP2 issues its collectives, and how to hide them from selective checkpoints |
| `policies` | selective activation checkpoints |
| `functional_collectives` | functional collectives, groups by name |
| `distributed_checkpoint` | the files of torch.distributed.checkpoint |
| `fake_ranks` | one process as one rank of many |
| `profiler` | named ranges, events |
| `memory` | identities of storages, the CUDA allocator's history |
| `optimizer` | hooks of state dicts |
| `muon` | Newton-Schulz and learning rates of torch.optim.Muon |
| `hardware` | instructions of the CPU, the float8 matmul of GPUs |
| `replacing` | how a block replaces one of these names, or another library's, and restores it |

Each file begins with its names, their purpose, and when they can be removed; "no replacement" means that torch 2.14 has
no public equivalent. tests/library/test_torch_private.py fails if a name disappears or changes, and if a private name
of a module of torch is used elsewhere. Names that a linear calls in every step are PyTorch's own C functions, to save
the call of a wrapper.

Used outside of this package:

- `TorchDispatchMode`, `is_traceable_wrapper_subclass` and `tree_*` of torch.utils._python_dispatch and _pytree, and
  operators of torch.ops.aten whose names begin with an underscore.
- Attributes of objects: `OpOverload._schema`, `Tensor._make_wrapper_subclass`, `Parameter._is_param`, `_orig_mod` of a
  compiled module, `_compiled_call_impl`, `_forward_pre_hooks`, `_forward_hooks` and `_forward_hooks_always_called` of a
  module, `_wrapped_by_lr_sched` of an optimizer's `step`, and `maybe_clear_saved_tensors` of a Function's `ctx`, which
  frees the saved tensors before its backward returns, unless the graph is retained.
- Methods of torch's parallel styles that quaver/parallel/tensor_parallel.py overrides or calls: `_apply`,
  `_prepare_input_fn`, `_prepare_input_arg` and `_prepare_input_kwarg_fn`.
- `_is_profiler_enabled` of torch.autograd.profiler, and parts of Inductor that a ledger of kernels replaces.
"""
