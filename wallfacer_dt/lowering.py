"""Keeping the order of operators that communicate in Inductor's generated code.

An operator made with ``torch.library`` is opaque to AOTAutograd and Inductor alike: none of them sees its collectives,
and at run time it does what it does in eager code. What is left to say is when it runs.

Note [One order on all ranks]
Ranks that share a process group must start its collectives in the same order. Inductor's scheduler keeps collective
kernels in the order of the graph, which is the same on all ranks; what else it moves depends on sizes, which differ
between ranks. So each operator that communicates is a collective kernel to Inductor. What passes over graphs do to
other collectives, before, it does not see.

Note [Never run again]
A partitioner that saves less than it could has operators run again in the backward, but for what a checkpoint's policy
must save, and for torch's own collectives. Which ones depends on sizes, too, and so on the rank. So each operator is
what must be saved, unless a checkpoint has it computed again. torch does not always go by it: docs/compile.md.

Private APIs of Inductor are called here only; run on torch 2.11.0, 2.13.0, 2.14.1 and 2.15.0.
"""

import sys
from functools import cache
from types import ModuleType
from typing import Any

from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.library import register_torch_dispatch
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy

_MAY_BE_SAVED = (None, CheckpointPolicy.PREFER_SAVE)


def keep_order(op: OpOverload) -> None:
    """Have Inductor lower a functional operator as one call that keeps its order among all collectives.

    And partitioners save what it gives, see Note [Never run again].

    Inductor is told when the operator is first traced into a graph after it was imported, and nobody imports it for
    that: a graph that it generates code for has been traced, unless the code is found in a cache.
    """

    def lowered(*args: Any) -> Any:
        from torch._inductor import ir

        return tree_map_only(ir.IRNode, ir.TensorBox.create, ir._CollectiveKernel.create(op, *args))

    @cache
    def tell(inductor: ModuleType) -> None:
        inductor.register_lowering(op, type_promotion_kind=None)(lowered)

    def traced(
        mode: ProxyTorchDispatchMode, func: OpOverload, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        inductor = sys.modules.get("torch._inductor.lowering")
        if inductor is not None:
            tell(inductor)
        out = mode.__torch_dispatch__(func, types, args, kwargs)
        call = next((node for node in reversed(mode.tracer.graph.nodes) if node.target is func), None)
        meta = {} if call is None else call.meta
        if meta.get("partitioner_tag") != "is_backward" and meta.get("recompute") in _MAY_BE_SAVED:
            meta["recompute"] = CheckpointPolicy.MUST_SAVE  # see Note [Never run again]
        return out

    register_torch_dispatch(op, ProxyTorchDispatchMode, traced)
