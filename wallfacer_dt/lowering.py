"""Lowering an operator that communicates into Inductor's generated code, in program order.

An operator made with ``torch.library`` is opaque to AOTAutograd, so neither the partitioner nor a graph pass (torch's
or a user's) sees its collectives. Inductor then asks for its lowering, and gets the operator's body: traced on this
rank, and pinned so that Inductor may fuse what lies between two collectives or kernels but moves no work across one.
No option of torch is read or set; other operators are not touched.

Note [Program order]
The body of a ring is written so that a transfer is started before the kernels it hides behind and waited for after
them. Left to its scheduler, Inductor would fuse all merges at the end (so that every partial output stays alive) and
may move waits next to their starts. So *barriers* (collectives, waits, attention kernels) keep their order by
scheduling dependencies, and what is computed between two of them and needed after the second is computed before it.
That is the order and the memory of the eager body, with one fused kernel where the body had many operations.

Note [One order on all ranks]
Ranks that share a process group must start its collectives in the same order. Inductor keeps its collective kernels in
the order of the graph, which is the same on all ranks; but what it may move otherwise depends on sizes, and the code of
an operator differs between ranks. So whatever communicates is a collective kernel to Inductor: the transfers of a body
anyway, and operators that stay opaque (``agree``, or attention of any length) as well.

Private APIs of Inductor are called here only; run on torch 2.11.0, 2.13.0 and 2.14.1.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, make_fx
from torch.utils._pytree import tree_leaves, tree_map_only

_BARRIERS = (
    "_c10d_functional::",
    "wallfacer_dt::",
    "aten::_scaled_dot_product",
    "aten::addmm",
    "aten::bmm",
    "aten::mm",
)


def lower(
    op: OpOverload,
    body: Callable[..., Any] | None = None,
    is_static: Callable[[Sequence[Any]], bool] = lambda _: True,
) -> None:
    """Have Inductor lower ``op`` as its body, or without one as one call that keeps its order among all collectives.

    Inductor is told when the operator is first traced into a graph after it was imported, and nobody imports it for
    that: a graph that it generates code for has been traced, unless the code is found in a cache.

    A graph whose shapes are symbols keeps the opaque operator, since a schedule is made for one length, and so does a
    call whose schedule depends on data: right, and it overlaps as in eager mode, but nothing is fused into it.

    Args:
        op: a functional operator whose tensor arguments come first.
        body: what it does on this rank, in traceable operations.
        is_static: from a call's arguments, whether its body can be traced: not where it depends on data.
    """

    def lowered(*args: Any) -> Any:
        if body is None:
            return _opaque(op, args)
        from torch._inductor.virtualized import V

        node = V.graph.current_node
        examples = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in node.args]
        if any(_is_symbolic(example) for example in examples) or not is_static(examples):
            return _opaque(op, args)
        return _run(_trace(body, examples, V.fake_mode), _realized(args, examples))

    @cache
    def tell(inductor: ModuleType) -> None:
        inductor.register_lowering(op, type_promotion_kind=None)(lowered)

    def traced(
        mode: ProxyTorchDispatchMode, func: OpOverload, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        inductor = sys.modules.get("torch._inductor.lowering")
        if inductor is not None:
            tell(inductor)
        return mode.__torch_dispatch__(func, types, args, kwargs)

    torch.library.register_torch_dispatch(op, ProxyTorchDispatchMode, traced)


def _opaque(op: OpOverload, args: Sequence[Any]) -> Any:
    from torch._inductor import ir

    return tree_map_only(ir.IRNode, ir.TensorBox.create, ir._CollectiveKernel.create(op, *args))


def _is_symbolic(example: Any) -> bool:
    if isinstance(example, Tensor):
        return any(not isinstance(n, int) for n in (*example.shape, *example.stride()))
    return isinstance(example, torch.SymInt | torch.SymFloat)


def _trace(body: Callable[..., Any], examples: Sequence[Any], fake_mode: Any) -> fx.GraphModule:
    """The body as a functional graph of Inductor's operations, inputs being the tensors among the examples."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._inductor.decomposition import select_decomp_table

    tensors = [example for example in examples if isinstance(example, Tensor)]

    def on_tensors(*given: Tensor) -> Any:
        rest = iter(given)
        return body(*(next(rest) if isinstance(example, Tensor) else example for example in examples))

    with fake_mode, enable_python_dispatcher():
        functional = functionalize(on_tensors, remove="mutations")
        graph_module = make_fx(functional, select_decomp_table(), tracing_mode="real")(*tensors)
    graph_module.graph.eliminate_dead_code()
    return graph_module


def _realized(args: Sequence[Any], examples: Sequence[Any]) -> list[Any]:
    """The tensors among an operator's arguments as buffers, laid out as the trace took them to be."""
    from torch._inductor import ir

    buffers = []
    for arg, example in zip(args, examples, strict=True):
        if isinstance(example, Tensor):
            # The body reads an argument at many steps; computed anew at each it would cost every time.
            buffer = ir.ExternKernel.require_exact_strides(arg, example.stride())
            buffer.realize()
            buffers.append(buffer)
    return buffers


def _run(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Lower a graph into the one that is being lowered, keeping its program order."""
    from torch._inductor.virtualized import V

    placeholders = iter(inputs)
    program = _Program(V.graph)
    section = _sections(graph_module.graph.nodes)
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            V.graph.env[node] = next(placeholders)
        elif node.op == "output":
            program.end_section()
            return fx.map_arg(node.args[0], V.graph.env.__getitem__)
        elif _is_barrier(node):
            program.end_section()
            program.barrier(node)
        else:
            lives_on = any(section[user] > section[node] for user in node.users)
            program.between(node, lives_on)
    raise AssertionError("a graph ends with its output")


class _Program:
    """Operations lowered so far, as barriers and the sections between them."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.last_barrier: list[str] = []
        self.since: list[str] = []
        self.living: list[Any] = []

    def barrier(self, node: fx.Node) -> None:
        """Lower a barrier: after the last one, and after all that was computed since."""
        self.last_barrier, self.since = self._lower(node, self.last_barrier + self.since), []

    def between(self, node: fx.Node, lives_on: bool) -> None:
        """Lower a node of the section; if it lives on, it must be computed by the section's end."""
        self.since += self._lower(node, self.last_barrier)
        if lives_on:
            self.living.append(self.graph.env[node])

    def end_section(self) -> None:
        """Compute what lives on."""
        from torch._inductor import ir

        mark = len(self.graph.operations)
        for leaf in tree_leaves(self.living):
            if isinstance(leaf, ir.TensorBox):
                leaf.realize()
        self.living = []
        self.since += self._pin(mark, self.last_barrier)

    def _lower(self, node: fx.Node, after: Iterable[str]) -> list[str]:
        mark, outer = len(self.graph.operations), self.graph.current_node
        self.graph.current_node = node
        try:
            self.graph.env[node] = self.graph.run_node(node)
        finally:
            self.graph.current_node = outer
        return self._pin(mark, after)

    def _pin(self, mark: int, after: Iterable[str]) -> list[str]:
        """Order the operations made since ``mark`` after the named buffers; return the names of theirs."""
        from torch._inductor import ir

        made = self.graph.operations[mark:]
        for operation in made:
            self.graph.additional_buffer_deps[operation.operation_name].update(after)
        # Some operations are no buffers of their own; those that they fill depend on them.
        return [operation.name for operation in made if isinstance(operation, ir.Buffer) and operation.name]


def _sections(nodes: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """For every node the number of barriers up to it; the output comes after all."""
    count, section = 0, {}
    for node in nodes:
        count += _is_barrier(node) or node.op == "output"
        section[node] = count
    return section


def _is_barrier(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.name().startswith(_BARRIERS)
