"""Train a byte-level GPT on source text, each sequence shared by a (ulysses, ring, team) mesh of ranks.

    torchrun --nproc-per-node 8 -m recipes.train_bytes --ring 4 --team 2
    torchrun --nproc-per-node 8 -m recipes.train_bytes --ring 4 --team 2 --ffn metp --attention metp
    python -m recipes.train_bytes demo

What lives where:
    settings: the options, and the checks that need no process group
    model: the network, which knows nothing of ranks
    train: one rank's loop
    demo: launches five runs and compares them
"""
