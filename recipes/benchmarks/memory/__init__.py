"""METP's memory beside tensor parallelism's and FSDP's: the paper's formulas, and what tensors hold."""
