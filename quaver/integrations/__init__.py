"""Integrations of quaver into other trainers. Each file imports its library when it is imported.

`import quaver` and `import quaver.export` change none of these libraries. The following calls change one for the whole
process, and none undoes it. They log what they replace at INFO (`install()` prints it), and wrap what other libraries
put there before. A second call changes nothing, unless another library replaced a wrapper since.

    a float8 all-gather, a selective checkpoint of quaver, in torch.distributed.fsdp
        hooks of FSDP2, whose ops policies of selective checkpoints then do not see (torch_private/fsdp.py)
    store_activations_in_float8, in torch._inductor
        `config.custom_partitioner_fn`, which changes only graphs of modules that store (activations/partition.py)
    import quaver.integrations.transformers, in transformers
        the registries of quantizers and of expert parallelism: "quaver" and "float8"
        `get_hf_quantizer`, which refuses a QuaverConfig for a folder with another quant_method
    load_float8, load_frozen, import_float8, in transformers if it is imported
        `PreTrainedModel.load_state_dict` and `save_pretrained`, which keep the quantization_config of a float8 folder
        in the config of a model in high precision (foreign/transformers.py)
    quaver.integrations.torchao.install(), in torchao and in all modules that imported its names
        the classes and functions of `torchao.float8`, which trainers call by these names
    Float8GroupedExpertsConverter, in torchtitan
        an entry of `_float8_experts_cache`, by which torchtitan recognizes quantized experts

Two places read the state of the process. `transformers_reference` looks for the calling Trainer on the stack, because a
Trainer does not pass itself to callbacks. `torchao` looks once for a Float8Linear among all objects, to warn.
"""
