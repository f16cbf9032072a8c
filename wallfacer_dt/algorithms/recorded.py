"""What a ``mask_mod`` does, written down: torch's operations on positions, and the tensors that they read.

Note [Recording a mask]
A mask_mod is called once with four positions, at every call of attention, and its operations are written down. What it
reads in Python (a number of its closure, a global, an attribute of any object) has then been read, and is part of the
recording as it was; tensors that it reads are inputs of whoever replays it. So a recording depends on nothing but these
tensors, and its name, the digest of its operations, is the same on every rank whose mask does the same. What cannot be
written down is refused: a value that leaves the positions for Python, random numbers, what torch does not show.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import EllipsisType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from wallfacer_dt.agreement.meeting import outside_dispatch

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_PLAIN = (
    *(bool, int, float, complex, str, bytes, range, slice, NoneType, EllipsisType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
# What they say of a tensor without its contents.
_OF_SHAPE = {"shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_cuda", "is_leaf", "names"} | {
    *("dim", "size", "numel", "__len__", "stride", "is_floating_point", "is_contiguous", "element_size", "get_device"),
    *("ndimension", "nelement", "is_complex", "is_signed", "itemsize", "nbytes", "type"),
}


class _Value(NamedTuple):
    """A tensor in a recording: the number-th of the positions, of what is captured, or of what a step gives.

    Or the device of the positions, which is another one on every rank.
    """

    kind: str
    number: int
    leaf: int = 0

    def __repr__(self) -> str:
        return f"{self.kind}{self.number}" + f".{self.leaf}" * bool(self.leaf)


class _Step(NamedTuple):
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __repr__(self) -> str:
        where = getattr(self.function, "__module__", None)
        return f"{where}.{_name_of(self.function)}{self.args}{self.kwargs or ''}"


class Recording:
    """A mask_mod as torch's operations on positions and captured tensors; see Note [Recording a mask]."""

    def __init__(self, steps: list[_Step], result: _Value) -> None:
        self._steps, self._result = steps, result
        used = {x for step in steps for x in tree_leaves((step.args, step.kwargs), _is_value) if _is_value(x)}
        # Whether it reads the row of the batch, and the head.
        self.by_row, self.by_head = (_Value("at", place) in {*used, result} for place in (0, 1))
        self.name = hashlib.sha256(repr((steps, result)).encode()).hexdigest()[:16]
        # What has been made of it, by whoever keeps it here.
        self.kept: dict[Any, Any] = {}

    def mask_mod(self, captured: tuple[Tensor, ...]) -> MaskMod:
        """The mask, reading these tensors."""

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            known: dict[str, Any] = {"at": (b, h, q, k), "device": (q.device,), "captured": captured, "step": []}

            def value(x: Any) -> Any:
                return tree_leaves(known[x.kind][x.number])[x.leaf] if isinstance(x, _Value) else x

            for step in self._steps:
                args, kwargs = tree_map(value, (step.args, step.kwargs), is_leaf=_is_value)
                known["step"].append(step.function(*args, **kwargs))
            return value(self._result)

        return mask_mod


def _is_value(x: Any) -> bool:
    return isinstance(x, _Value)


def _name_of(function: Any) -> str:
    # A getter is a method of what describes the attribute.
    owner = getattr(getattr(function, "__self__", None), "__name__", "")
    name = getattr(function, "__qualname__", None) or str(function)
    return f"{owner}.__get__" if name.endswith(".__get__") else f"{owner}.{name}" if owner else name


def record(
    mask: MaskMod | BlockMask, device: torch.device, lengths: tuple[int, int] | None
) -> tuple[Recording, tuple[Tensor, ...]]:
    """What a mask does now, and the tensors that it reads, in order; see Note [Recording a mask].

    A BlockMask is what flex_attention takes it to say: its mask_mod in listed blocks, all of those listed as full.
    ``lengths``: of queries and keys in the whole sequence, where they are known. Raises TypeError where something
    cannot be written down or is no boolean, ValueError for a BlockMask of other lengths.
    """
    function = _by_table(mask, lengths) if isinstance(mask, BlockMask) else mask
    with outside_dispatch(), torch.no_grad():
        at = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(4)]
        recorder = _Recorder(at)
        with recorder.operations, recorder:
            result = function(*at)
        return recorder.recording(result), tuple(recorder.captured)


class _Recorder(TorchFunctionMode):
    """Writes down what is done while it is active."""

    def __init__(self, at: list[Tensor]) -> None:
        super().__init__()
        self._device = at[0].device
        self._values = {id(x): _Value("at", place) for place, x in enumerate(at)}
        self._steps: list[_Step] = []
        # What may be another for every pair; all, once something has been changed in place to what may be.
        self._varying: set[_Value] = set(self._values.values())
        self._all_vary = False
        self.operations = _Operations()
        # As long as it lives nothing else gets its id, or its memory.
        self._alive: list[Any] = [*at]
        self.captured: list[Tensor] = []

    def recording(self, result: Any) -> Recording:
        """All that has been done, with the mask's answer."""
        if not self.operations.changed.isdisjoint(map(_memory, (*self._alive[:4], *self.captured))):
            raise _unwritten("changes in place what it is given or captures")
        if not isinstance(result, Tensor) or result.dtype != torch.bool:
            what = f"a tensor of {result.dtype}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
            raise UnrecordedError(f"mask_mod must return a boolean tensor, as comparisons do, got {what}")
        if result.ndim:
            raise UnrecordedError(
                f"mask_mod must return one answer for one pair of positions, got a tensor of shape {(*result.shape,)}"
            )
        return Recording(self._steps, self._value(result))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name_of(func)
        if not str(getattr(func, "__module__", None) or "torch").startswith("torch"):
            raise _unwritten(f"calls `{name}`, which is no function of torch")
        if name.endswith("__set__"):
            raise _unwritten(f"sets `{name.partition('.')[0]}` of a tensor")
        written = tree_map(self._written, (args, kwargs))
        used = {x for x in tree_leaves(written, _is_value) if _is_value(x)}
        varies = self._all_vary or not self._varying.isdisjoint(used)
        with self.operations.shown() as changes:
            result = func(*args, **kwargs)
        leaves = tree_leaves(result)
        if changes or any(isinstance(x, Tensor) for x in leaves):
            for leaf, x in enumerate(leaves):
                if isinstance(x, Tensor) and id(x) not in self._values:
                    self._values[id(x)] = _Value("step", len(self._steps), leaf)
            if varies:
                self._varying |= used | {_Value("step", len(self._steps), leaf) for leaf in range(len(leaves))}
                self._all_vary |= bool(changes)
            self._alive.append(result)
            self._steps.append(_Step(func, *written))
        elif varies and name.removesuffix(".__get__").rpartition(".")[2] not in _OF_SHAPE:
            raise _unwritten(f"takes a value out of a tensor of positions (`{name}`), which Python would see once")
        return result

    def _written(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self._value(x)
        if isinstance(x, slice) and any(isinstance(end, Tensor) for end in (x.start, x.stop, x.step)):
            raise _unwritten("slices by a tensor")
        if isinstance(x, torch.device) and x == self._device:
            return _Value("device", 0)
        if isinstance(x, _PLAIN):
            return x
        raise _unwritten(f"hands torch a {type(x).__name__}: capture numbers and tensors of torch")

    def _value(self, x: Tensor) -> _Value:
        if id(x) not in self._values:
            if id(x) in self.operations.made:
                raise _unwritten("makes a tensor in a way that torch does not show")
            if type(x) not in (Tensor, nn.Parameter) or x.layout is not torch.strided or torch._is_functional_tensor(x):
                raise _unwritten(f"captures a {type(x).__name__} of layout {x.layout}: capture a plain tensor")
            self._values[id(x)] = _Value("captured", len(self.captured))
            self.captured.append(x)
        return self._values[id(x)]


class _Operations(TorchDispatchMode):
    """Sees all that is done with tensors while it is active, by whatever way; refuses what is random."""

    def __init__(self) -> None:
        super().__init__()
        self._changes: list[int] | None = None
        # By id all tensors that come from an operation, and the memory that has been written into.
        self.made: dict[int, Tensor] = {}
        self.changed: set[int] = set()

    @contextmanager
    def shown(self) -> Iterator[list[int]]:
        """Where a function runs that torch has shown; gives what memory it writes into."""
        self._changes = changes = []
        try:
            yield changes
        finally:
            self._changes = None
            self.changed.update(changes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._changes is None:  # as operations of TorchScript, which are shown from here
            if not torch._C._is_torch_function_mode_enabled():
                raise _unwritten(f"calls `{func}` in a way that torch does not show")
            with self:
                return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _unwritten(f"draws random numbers (`{func}`), which ranks would draw differently")
        if func._schema.is_mutable:
            arguments = func._schema.arguments
            given = dict(zip((x.name for x in arguments), args, strict=False)) | kwargs
            written = [given.get(x.name) for x in arguments if x.alias_info and x.alias_info.is_write]
            self._changes += [_memory(x) for x in tree_leaves(written) if isinstance(x, Tensor)]
        result = func(*args, **kwargs)
        self.made |= {id(x): x for x in tree_leaves(result) if isinstance(x, Tensor)}
        return result


def _memory(x: Tensor) -> int:
    """What views of one another share."""
    return x.untyped_storage()._cdata


class UnrecordedError(TypeError):
    """A mask does what cannot be written down."""


def _unwritten(what: str) -> UnrecordedError:
    return UnrecordedError(
        f"mask_mod {what}; it must be operations of torch on its four positions and on captured tensors"
    )


def _by_table(mask: BlockMask, lengths: tuple[int, int] | None) -> MaskMod:
    """What flex_attention takes a BlockMask to say."""
    if lengths is not None and tuple(mask.seq_lengths) != lengths:
        raise ValueError(
            f"the BlockMask is for {mask.seq_lengths[0]} queries and {mask.seq_lengths[1]} keys, the whole sequence "
            f"has {lengths[0]} and {lengths[1]}"
        )
    q_size, k_size = mask.BLOCK_SIZE

    def listed(counts: Tensor, indices: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        # A table that is one for all rows, or heads, does not depend on them.
        row = (b if len(counts) > 1 else 0, h if counts.shape[1] > 1 else 0, q // q_size)
        places = torch.arange(indices.shape[-1], device=q.device)
        return ((indices[row] == k // k_size) & (places < counts[row])).any()

    def function(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        at = (b, h, q, k)
        seen = listed(mask.kv_num_blocks, mask.kv_indices, *at) & mask.mask_mod(*at)
        if mask.full_kv_num_blocks is None or mask.full_kv_indices is None:
            return seen
        return seen | listed(mask.full_kv_num_blocks, mask.full_kv_indices, *at)

    return function
