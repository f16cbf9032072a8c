"""Train a causal language model of Hugging Face transformers on local text, each sequence shared by a mesh of ranks.

    torchrun --nproc-per-node 8 -m recipes.finetune_hf --ring 4 --team 2 --model PATH --text FILE
    python -m recipes.finetune_hf demo

The model is not edited; without `--model` it is a small Llama with random weights, on bytes. Documents are packed, and
see themselves only. Weights, gradients and the optimiser are sharded over all ranks by FSDP2.

What lives where:
    settings: the options of this recipe
    documents: local text as packed sequences of tokens
    train: the model, FSDP2, the loss
    demo: launches two runs and compares them
"""
