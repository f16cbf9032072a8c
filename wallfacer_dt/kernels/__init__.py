"""One query block against one key block, forward and backward, and the merging of partial results.

A kernel is a pair of functions on local tensors in SDPA's layout (B, N, L, H), grouped heads allowed, and what they can
run: see :class:`BlockKernel`. ``reference`` is the specification, in plain tensor operations; ``aten`` holds torch's
fused kernels, ``flex`` its flex_attention, for masks on CUDA; ``flash_attn`` the packages of that name. ``registry``
knows them by name, and a user's own.
"""
