"""Float8 all-gather of sharded weights under FSDP2, with the scales of the whole weight."""
