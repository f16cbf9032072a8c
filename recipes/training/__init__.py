"""What the recipes that train have in common.

What lives where:
    settings: the options of every recipe, and the checks that need no process group
    command: dataclasses of options as a command line
    text: finding the bytes to train on
    ranks: joining the other ranks
    batches: this rank's batches, and how far they are
    trainer, gradients: one optimiser step of all ranks together
    loop: the steps of a run, with its `progress` bar, `metrics` and checkpoints
    traffic: the bytes that attention and METP received in a step
    checkpoint, manifest: what is kept of a run, whole or not at all
    record: what a run leaves behind
    compare: whether runs agree
    report, picture: what to show of them
    demo: makes runs in processes of their own, with `launch`, and compares them
"""
