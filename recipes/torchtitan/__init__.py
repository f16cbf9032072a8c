"""torchtitan's Trainer and its decoders with Ring Attention or WallFacer, by configuration.

    torchrun --nproc-per-node 4 -m recipes.torchtitan --config llama3_debugmodel
    torchrun --nproc-per-node 8 -m recipes.torchtitan --config llama3_8b --hf_assets_path DIR

What lives where:
    shim: what torchtitan 0.3.0 lacks on a CPU, and on torch 2.13
    text: a byte tokenizer, and sequences of a local text
    checkpointing: torchtitan's activation checkpointing, with attention saved
    trainer: the Trainer with the fields of this recipe, which hands attention its documents
    check: which configurations are refused
    parallelize: torchtitan's sequence of parallelisms, with this package's attention put in
    config_registry: the configurations that `--config` names
"""
