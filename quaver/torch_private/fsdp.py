"""The insides of FSDP2.

- `COLLECTIVES_MODULE`: torch.distributed.fsdp._fully_shard._fsdp_collectives, whose functions allocate the buffers of
  all-gathers and reduce-scatters. Its name stands in their Python frames. No replacement.
"""

COLLECTIVES_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
