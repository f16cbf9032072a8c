"""Where METP's weights are: a mesh's axes as METP takes them, and modules whose weights are sharded over them."""

import math
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from wallfacer_dt.agreement.agree import agree, refusing_together
from wallfacer_dt.compiler import opaque, sizes
from wallfacer_dt.kernels.merge import accumulation_dtype
from wallfacer_dt.layout import shard_sizes
from wallfacer_dt.mesh import CONTEXT_AXES, check_ascending, is_flattened, mesh_ranks, name_of, whole_context_group

Read = TypeVar("Read")
TENSOR_AXIS = "tp"


class Shards(NamedTuple):
    """What parameters have become under METP.

    Attributes:
        wholes: by name, the whole shape and the placements of its DTensor, and these in words, as a graph cannot say.
        nested: the name of one whose shards are nested, see :meth:`WeightMesh.check_gathered`, or empty.
    """

    wholes: Mapping[str, tuple[torch.Size, tuple[Placement, ...], str]]
    nested: str


@dataclass(frozen=True, slots=True)
class WeightMesh:
    """The mesh that weights are sharded over.

    Attributes:
        mesh: the axes that the sequence is sharded over, and perhaps ``tp``, last.
        context: sizes of the former.
        tp: size of ``tp``.
        index: this rank's along the former.
        tp_rank: along ``tp``.
        group: name of the process group of the former together.
        ranks: for every index along them its rank in the group.
        tp_mesh: the axis ``tp`` alone, where there is one.
        name: of the mesh, by which ranks compare their calls.
        tp_name: of ``tp`` alone, or empty.
    """

    mesh: DeviceMesh
    context: tuple[int, ...]
    tp: int
    index: int
    tp_rank: int
    group: str
    ranks: tuple[int, ...]
    tp_mesh: DeviceMesh | None
    name: str
    tp_name: str

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "WeightMesh":
        """Read a mesh; all its ranks call this together, since a process group may be made.

        Args:
            mesh: axes ``cp_ulysses``, ``cp_ring`` and ``cp_team`` or some of them, or one of any name; then ``tp``.

        Returns:
            The mesh as METP takes it.
        """
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
        names = tuple(mesh.mesh_dim_names or ("",) * mesh.ndim)
        context = names[:-1] if names[-1] == TENSOR_AXIS else names
        if not context or (len(context) > 1 and context != tuple(axis for axis in CONTEXT_AXES if axis in context)):
            raise ValueError(
                f"mesh must have axes {CONTEXT_AXES}, or some of them in this order, or one of any name; and may have "
                f"{TENSOR_AXIS!r} after them; got {mesh.mesh_dim_names}"
            )
        place = mesh.get_coordinate()
        if place is None:
            raise ValueError(f"this rank is not in the mesh {mesh.mesh.tolist()}")
        check_ascending(mesh)
        # Making a group is done together, so no rank may be doing something else.
        agree("METP", [("mesh", context)], name_of(mesh))
        group, ranks = whole_context_group(mesh, context)
        sizes = tuple(mesh.shape[: len(context)])
        index = 0
        for size, position in zip(sizes, place, strict=False):
            index = index * size + position
        if len(names) == len(context):
            return cls(mesh, sizes, 1, index, 0, group, ranks, None, name_of(mesh), "")
        tp = mesh[TENSOR_AXIS]
        return cls(mesh, sizes, tp.size(), index, place[-1], group, ranks, tp, name_of(mesh), name_of(tp))

    def together(
        self,
        read: Callable[[], Read],
        module: nn.Module,
        dims: Mapping[str, int],
        layouts: tuple[Placement, Placement],
        source: int | None,
        told: Mapping[str, Hashable],
    ) -> Read:
        """Refuse on all ranks a module that one refuses, or that is another on one; see Note [Refusing together].

        Args:
            read: refuses a module, or gives what the style needs to know of it.
            module: of which :meth:`shard` is to send parameters.
            dims: as for :meth:`shard`.
            layouts: the style's, of input and output.
            source: as for :meth:`shard`.
            told: by name what else the style was told, which ranks must have been alike.

        Returns:
            What ``read`` gives.

        Raises:
            ValueError: on every rank: parameters or styles differ between ranks.
        """
        with refusing_together(self.name):
            if self.tp_mesh is None and any(not isinstance(layout, Replicate) for layout in layouts):
                raise ValueError(
                    f"input_layouts and output_layouts are of the axis {TENSOR_AXIS!r}, and the mesh has "
                    f"{self.mesh.mesh_dim_names}: slice it with {TENSOR_AXIS!r} last, or leave them out; got {layouts}"
                )
            result = read()
            self._check_parameters(module, dims)
            style = {**told, "input_layouts and output_layouts": layouts, "src_data_rank": source}
            agree("METP applied", {**style, **_described(module, dims)}.items(), self.name)
        return result

    def _check_parameters(self, module: nn.Module, dims: Mapping[str, int]) -> None:
        """Refuse (ValueError) parameters that cannot be sharded."""
        for name in self._nested(module, dims)[:1]:
            self.check_gathered(name)
        for name in _present(module, dims):
            parameter = module.get_parameter(name)
            # Private names of torch; run on 2.11.0, 2.13.0, 2.14.1 and 2.15.0.
            hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
            if hooks or parameter.grad is not None:
                raise ValueError(
                    f"{type(module).__name__}.{name} has {'hooks' if hooks else 'a gradient'}, which the DTensor that "
                    "METP puts in its place would not have: apply METP before hooks, backwards and optimizers"
                )
            if id(parameter) in _taken:
                raise ValueError(
                    f"{type(module).__name__}.{name} is a weight of another module under METP as well, to which it "
                    "would be tied no more"
                )

    @property
    def context_mesh(self) -> DeviceMesh:
        """The axes of the sequence."""
        return self.mesh if self.tp_mesh is None else self.mesh[(self.mesh.mesh_dim_names or ())[:-1]]

    def sizes(self, length: int) -> tuple[int, ...]:
        """By index along the sequence's axes, what ranks of this ``tp`` rank hold of a dim of that length."""
        return shard_sizes(length, (*self.context, self.tp))[self.tp_rank :: self.tp]

    def by_rank(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """What is given by index, by rank of the group."""
        by_index = dict(zip(self.ranks, sizes, strict=True))
        return tuple(by_index[rank] for rank in range(len(sizes)))

    def shard(self, module: nn.Module, dims: Mapping[str, int], source: int | None) -> Shards:
        """Make the named parameters DTensors, sharded by these dims over all axes; :meth:`together` has seen them.

        Args:
            module: the module.
            dims: by name; a bias may be absent.
            source: the rank whose values count; None: every rank's own, which are the same.

        Returns:
            What they are now.
        """
        nested, wholes = self._nested(module, dims), {}
        for name in _present(module, dims):
            owner, _, last = name.rpartition(".")
            holder, parameter = module.get_submodule(owner), module.get_parameter(name)
            placements = [Shard(dims[name])] * self.mesh.ndim
            whole = distribute_tensor(parameter.detach(), self.mesh, placements, src_data_rank=source)
            holder.register_parameter(last, nn.Parameter(whole, requires_grad=parameter.requires_grad))
            _taken[id(parameter)] = weakref.ref(parameter, partial(_forget, id(parameter)))
            said = f"the DTensor {tuple(whole.shape)} placed {whole.placements}"
            wholes[name] = whole.shape, whole.placements, said
        return Shards(wholes, nested[0] if nested else "")

    def check_shards(self, shards: Shards, parts: Mapping[str, Tensor]) -> None:
        """Refuse (TypeError) weights and biases, by name, that are not what :meth:`shard` made of them.

        A whole weight would pass for a shard of a larger one, and attention be computed with the wrong heads.
        """
        for name, (shape, placements, said) in shards.wholes.items():
            part = parts.get(name)
            if not isinstance(part, DTensor):
                found = "none" if part is None else f"a plain tensor {sizes(part)}"
                remedy = (
                    "apply METP to a new module, and load whole weights into it by "
                    "torch.distributed.checkpoint.state_dict.set_model_state_dict(..., options="
                    "StateDictOptions(full_state_dict=True)), not by assign=True or functional_call"
                )
            elif part.shape != shape or part.placements != placements or part.device_mesh != self.mesh:
                found = f"a DTensor {tuple(part.shape)} placed {part.placements} on {part.device_mesh}"
                remedy = "call it through the module that FSDP2 shards, if one does, or place the weight so"
            else:
                continue
            raise TypeError(f"{name} must be {said} that METP made of it on its mesh, got {found}: {remedy}")
        for name in parts:
            if name not in shards.wholes:
                raise TypeError(f"{name} was not there when METP was applied: apply it to a module that has it")

    def check_gathered(self, name: str) -> None:
        """Refuse (ValueError) a nested shard that torch would not put together again as it was cut (torch 2.13.0)."""
        if is_flattened(self.mesh):
            raise ValueError(
                f"{name} is cut over axes {self.mesh.mesh_dim_names} in turn, and a mesh that flattens them "
                "exists, with which torch gathers such DTensors wrongly: let the length divide and ranks ascend along "
                "the mesh (context_mesh's placement), or do not flatten it"
            )

    def _nested(self, module: nn.Module, dims: Mapping[str, int]) -> list[str]:
        present = _present(module, dims)
        return [name for name in present if self._is_nested(module.get_parameter(name).shape[dims[name]])]

    def _is_nested(self, length: int) -> bool:
        """Whether shards of this length are not those of one axis."""
        axes, ranks = tuple(self.mesh.shape), mesh_ranks(self.mesh)
        return shard_sizes(length, axes) != shard_sizes(length, (math.prod(axes),)) or ranks != tuple(sorted(ranks))

    def whole(self, bias: Tensor) -> Tensor:
        """All of a bias that is sharded over the mesh, on every rank, whose gradients of it are summed."""
        assert isinstance(bias, DTensor), "the style has made it one"
        # One axis at a time, the innermost first, as shards are nested; torch warns of doing it in one.
        whole: Any = bias.to(accumulation_dtype(bias.dtype))  # in which gradients are summed
        for axis in reversed(range(self.mesh.ndim)):
            whole = whole.redistribute(placements=[*whole.placements[:axis], *[Replicate()] * (self.mesh.ndim - axis)])
        return whole.to_local(grad_placements=[Partial()] * self.mesh.ndim)


# Parameters in whose place there are DTensors now, by identity, as long as somebody else holds them.
_taken: dict[int, weakref.ref[nn.Parameter]] = {}


def _forget(identity: int, _: weakref.ref[nn.Parameter]) -> None:
    _taken.pop(identity, None)


def _present(module: nn.Module, dims: Mapping[str, int]) -> list[str]:
    """Which of the named parameters there are: a bias may be absent."""
    present = dict(module.named_parameters())
    return [name for name in dims if name in present]


def _described(module: nn.Module, dims: Mapping[str, int]) -> dict[str, str]:
    """What ranks must have alike before a module's parameters are sent, by their names."""
    parameters = {name: module.get_parameter(name) for name in _present(module, dims)}
    return {name: f"{tuple(p.shape)} {p.dtype} on {p.device.type}" for name, p in parameters.items()}


def local(parameter: Tensor | None) -> Tensor | None:
    """This rank's shard of what :meth:`WeightMesh.check_shards` has seen."""
    if parameter is None:
        return None
    assert isinstance(parameter, DTensor), "the style has made it one"
    return parameter.to_local()


def watched(y: Tensor, x: Tensor, taken: Tensor, parts: Mapping[str, Tensor], added: str, mesh: str) -> Tensor:
    """A result whose backward refuses (RuntimeError) x, weights and biases that have been changed in place meanwhile.

    Autograd looks after what an operator saves; of DTensors that is their local tensors, which a change of the DTensor
    does not mark as changed. Nor does torch count changes by ``foreach`` and ``fused`` operations on DTensors, so
    optimizers are listened to. In eager mode only: a compiled graph is not watched.

    Args:
        y: the result, before a bias is added.
        x: what was given.
        taken: what of it the operator took.
        parts: weights and biases by name.
        added: the name of that bias, of which the backward of y wants nothing: its own gradient is there before that
            of y, and whoever steps where gradients come has changed it by then.
        mesh: whose ranks refuse together.

    Returns:
        y.
    """
    if torch.compiler.is_compiling() or not y.requires_grad:
        return y
    saved = {name: part for name, part in parts.items() if name != added}
    if isinstance(x, DTensor) and _storage(x.to_local()) == _storage(taken):
        saved["x"] = x
    _listen()
    # Not held: a hook lives as long as the graph, and what a checkpoint computes again is gone before.
    watches = [_Watch(name, weakref.ref(part), part._version) for name, part in saved.items()]
    _watches.update(watches)

    @opaque
    def check(_: Tensor) -> None:
        with refusing_together(mesh):
            for watch in watches:
                part = watch.part()
                if part is not None and (watch.is_stepped or part._version != watch.version):
                    raise RuntimeError(
                        "one of the variables needed for gradient computation has been modified by an inplace "
                        f"operation: {watch.name} under METP was changed between forward and backward"
                    )

    y.register_hook(check)
    return y


@dataclass(eq=False)
class _Watch:
    """A tensor as it was in a forward, for as long as its graph.

    Attributes:
        name: for messages.
        part: the tensor.
        version: by torch's count.
        is_stepped: whether an optimizer has stepped on it since.
    """

    name: str
    part: weakref.ref[Tensor]
    version: int
    is_stepped: bool = False


_watches: weakref.WeakSet[_Watch] = weakref.WeakSet()


@cache
def _listen() -> None:
    """Have optimizers say, from now on, what they have stepped on."""

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        if _watches:
            every = chain.from_iterable(group["params"] for group in optimizer.param_groups)
            changed = {id(parameter) for parameter in every if parameter.grad is not None}
            for watch in list(_watches):
                watch.is_stepped |= id(watch.part()) in changed

    register_optimizer_step_post_hook(stepped)


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
