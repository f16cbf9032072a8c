"""Train a small diffusion transformer on sheets of handwritten digits, each sheet shared by a mesh of ranks.

    torchrun --nproc-per-node 8 -m recipes.train_dit --ring 4 --team 2 --sheet 16
    python -m recipes.train_dit demo

Full attention over all patches of a picture, as WallFacer's second workload has it. The digits are those that
scikit-learn ships (`load_digits`, 1,797 pictures of 8 x 8 pixels).

What lives where:
    settings: the options of this recipe
    sheets: pictures as sequences of patches, with their noise
    model: the network, which knows nothing of ranks
    train: the plan, the loss
    sample: pictures that the model makes, on all ranks
    demo: launches two runs and compares them
"""
