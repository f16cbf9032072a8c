"""The ParallelStyle of METP for attention with its projections."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from wallfacer_dt.attention import ContextAttention
from wallfacer_dt.autocast import as_computed
from wallfacer_dt.bound import BoundForward
from wallfacer_dt.compiler import sizes
from wallfacer_dt.equivalence.inputs import shortened
from wallfacer_dt.matching import AttentionStyle
from wallfacer_dt.metp.attention import BlockOptions, metp_attention, shaped
from wallfacer_dt.metp.boundary import Boundary, check_layouts
from wallfacer_dt.metp.holding import WeightMesh, local, watched
from wallfacer_dt.metp.modules import (
    AsApplied,
    check_names,
    check_projections,
    check_returns_one,
    linear,
    needing_gradients,
    parts_of,
)
from wallfacer_dt.metp.proof import (
    LARGE,
    LARGEST,
    SMALL,
    Inputs,
    Returned,
    compare,
    first_that_agrees,
    once,
    small_inputs,
    where_it_runs,
)
from wallfacer_dt.metp.rotation import DOCUMENTS, Arguments, Rotary, Rotation
from wallfacer_dt.styles import RingParallel, WallFacerParallel
from wallfacer_dt.unmatched import name_in_plan
from wallfacer_dt.validation import check_call


class METPAttentionParallel(AttentionStyle):
    """Two-level METP for attention (Algorithms 5 and 6): projections that ranks share, in groups of heads.

    The module projects x (B, L, D) to queries, keys and values, may turn queries and keys by their positions, attends,
    and projects back; it has no other parameters than these ``nn.Linear`` projections'. They become DTensors, sharded
    by heads over all axes of the mesh. Group after group of heads, who holds the weights broadcasts them, and
    attention runs on these heads as the style ``attention`` says. Saved are x, the heads' output and lse.

    Keyword Args:
        output: name of the projection back.
        head_dim: H; numbers of heads follow from the weights.
        attention: :class:`RingParallel` or :class:`WallFacerParallel`: mask, token order, schedule, kernel. With its
            ``kernel="reference"`` this is METP without flash attention: what exists of the scores at a time is those
            of one group's heads, one rank's tokens by another's.
        query: name of the projection to queries; together with ``key`` and ``value``, or none of them with ``qkv``.
        key: of the one to keys.
        value: of the one to values.
        qkv: of one to all three, whose rows are those of queries, keys and values one after the other.
        kv_heads: key and value heads, where ``qkv`` does not have as many of all three.
        rotary: pairs of elements that positions turn: ``"half"`` (Hugging Face), ``"interleaved"`` (Llama), or None.
        rotation: from the module and the arguments and keywords of a call after x to cos and sin, (L, H / 2) or
            (B, L, H / 2), of this rank's tokens. By default these are a pair of tensors, or a complex one, of the call.
            Either way they may have H for H / 2, with every angle twice.
        example: from a number of tokens to arguments and keywords to try the module with after x: what calls bring,
            where cos and sin, what ``rotation`` finds them in, and ``position_ids`` if it has them, may have other
            values (documents are told by ``document_ids`` or ``cu_seqlens``). By default none, or both.
        input_layouts: of a plain x on an axis ``tp``: ``Replicate()``, or ``Shard(1)`` under sequence parallelism.
        output_layouts: of the output on an axis ``tp``.
        check: compare the module with the formula first, in this process, on 1152 tokens, or more if the style's window
            or prefix is longer, and small random weights of two key heads: a window of more than 1024 that stands in
            the module's code is not seen, nor are other heads that do otherwise. Buffers are taken to stay as they are.
            A module that returns a tuple with Nones behind the output, as transformers', goes on doing so if checked.

    The mesh is as for :class:`METPParallel`, as are hooks and weights of others, but with all axes that the sequence is
    sharded over, and ``cp_ulysses`` of 1. With fewer key heads than ranks there are as many groups as key heads.
    """

    _kind: ClassVar[str] = "attention with its projections"

    def __init__(
        self,
        *,
        output: str,
        head_dim: int,
        attention: RingParallel | WallFacerParallel,
        query: str | None = None,
        key: str | None = None,
        value: str | None = None,
        qkv: str | None = None,
        kv_heads: int | None = None,
        rotary: str | None = None,
        rotation: Rotation | None = None,
        example: Callable[[int], Arguments] | None = None,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        check: bool = True,
    ) -> None:
        super().__init__()
        separate = {"query": query, "key": key, "value": value}
        given = {name: value for name, value in (separate | {"qkv": qkv}).items() if value is not None}
        if list(given) not in (list(separate), ["qkv"]):
            raise ValueError(f"projections are query, key and value, or qkv, got {', '.join(given) or 'none'}")
        check_names(given | {"output": output})
        for name, number in (("head_dim", head_dim), ("kv_heads", kv_heads)):
            if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
                raise ValueError(f"{name} must be a positive int, got {number!r}")
        if not isinstance(attention, RingParallel | WallFacerParallel):
            raise TypeError(f"attention must be RingParallel or WallFacerParallel, got {type(attention).__name__}")
        told = attention.options
        unknown = {"mask_mod": told.mask_mod, "replicated": told.replicated, "kv_length": told.kv_length}
        if refused := [name for name, value in unknown.items() if value]:
            raise ValueError(f"METPAttentionParallel does not implement {refused[0]}")
        if not isinstance(check, bool):
            raise TypeError(f"check must be a bool, got {check!r}")
        self.projections = [str(name) for name in given.values()]
        self.output, self.head_dim, self.kv_heads = output, head_dim, kv_heads
        self.attention, self.rotary = attention, Rotary(rotary, head_dim, rotation)
        if rotation is not None and example is None:
            raise ValueError("rotation needs example=, which says what else a call of the module brings")
        self.example, self.check = example, check
        self.layouts = check_layouts(input_layouts, output_layouts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        who = type(self).__name__
        weights, returned = WeightMesh.of(device_mesh), Returned()

        def read() -> tuple[ContextAttention, int, int, Rotary]:
            # First, since beside tp fewer ranks meet in it than hear of a refusal here.
            attention = self.attention.attention_on(weights.context_mesh, self.attention.options)
            heads, kv_heads = self._heads(module, weights, attention, who)
            rotary = self._checked(module, heads, kv_heads, returned, weights.mesh.device_type)
            return attention, heads, kv_heads, rotary

        dims = {f"{name}.{part}": 0 for name in self.projections for part in ("weight", "bias")}
        dims |= {f"{self.output}.weight": 1, f"{self.output}.bias": 0}
        told = {"METP's style": who, "head_dim": self.head_dim, "its projections": (*self.projections, self.output)}
        attention, heads, kv_heads, rotary = weights.together(
            read, module, dims, self.layouts, self.src_data_rank, told
        )
        shards = weights.shard(module, dims, self.src_data_rank)
        block = BlockOptions(
            heads // weights.tp, kv_heads // weights.tp, self.head_dim, self.rotary.pairs or "", weights.context,
            weights.ranks, weights.index, weights.group, weights.name,
        )  # fmt: skip
        boundary = Boundary(weights, *self.layouts, shards)
        # Bound, so that a copy of the module uses its own weights.
        out_dim = linear(module, self.output).out_features
        # As the style is now, whatever becomes of it.
        forward = copy.copy(self)._forward(boundary, block, attention, rotary, AsApplied.of(module), returned, out_dim)
        self._notice_applied(module, weights.context_mesh)
        module.forward = BoundForward(forward, module, who, name_in_plan(module)).forward
        return module

    def _sharing(self, mesh: DeviceMesh) -> DeviceMesh:
        """The axes of a mesh that share sequences."""
        return WeightMesh.of(mesh).context_mesh

    def _heads(self, module: nn.Module, weights: WeightMesh, attention: ContextAttention, who: str) -> tuple[int, int]:
        """Query heads and key heads, from the weights, or a refusal (ValueError) of the module or the mesh."""
        if attention.place.ulysses > 1:
            raise ValueError(f"{who} goes by heads already: cp_ulysses must be 1, got {attention.place.ulysses}")
        check_projections(module, [*self.projections, self.output], who)
        H = self.head_dim
        rows = [linear(module, name).weight.shape[0] for name in self.projections]
        columns = linear(module, self.output).weight.shape[1]
        if len(rows) == 1:
            kv = rows[0] // 3 if self.kv_heads is None else self.kv_heads * H
            rows = [rows[0] - 2 * kv, kv, kv]
        heads, kv_heads = rows[0] // H, rows[1] // H
        divide = kv_heads > 0 and heads > 0 and heads % kv_heads == 0 and not any(n % H for n in rows)
        if not divide or rows[1] != rows[2] or columns != rows[0]:
            raise ValueError(
                f"{who}: rows of q, k and v must be heads of {H}, as many of v as of k and a multiple of q, which the "
                f"output takes, got {rows} and {columns}"
            )
        if self.kv_heads not in (None, kv_heads):
            raise ValueError(f"{who} was given kv_heads={self.kv_heads}, the weights have {kv_heads}")
        if weights.tp > 1 and len(self.projections) == 1:
            raise ValueError(f"{who}: with an axis 'tp' projections must be query, key and value, not one qkv")
        if weights.tp > 1 and kv_heads % (weights.tp * len(weights.ranks)):
            raise ValueError(
                f"{who}: with an axis 'tp' every rank must hold whole heads, got {kv_heads} key and value heads on "
                f"{len(weights.ranks)} x {weights.tp} ranks"
            )
        return heads, kv_heads

    def _forward(
        self,
        boundary: Boundary,
        block: BlockOptions,
        attention: ContextAttention,
        rotary: Rotary,
        applied: AsApplied,
        returned: Returned,
        out_dim: int,
    ) -> Callable[..., Any]:
        names, who = [*self.projections, self.output], type(self).__name__

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            x, args, kwargs = rotary.parameters.split(args, kwargs)
            documents = {name: kwargs.pop(name, None) for name in DOCUMENTS}
            cos = sin = None

            def check() -> None:
                nonlocal cos, sin
                if x is None:
                    raise TypeError(f"called without {rotary.parameters.x}")
                parts = parts_of(module, names)
                # What finds angles may be a submodule, which is called.
                applied.check(module, who, None if self.rotary.rotation is None else names)
                weight = linear(module, self.projections[0]).weight
                boundary.check(x, weight, parts, sequence=True)
                if x.ndim != 3:
                    raise ValueError(f"x must have shape (B, L, D), got {sizes(x)}")
                inside = (x.to_local() if isinstance(x, DTensor) else x).new_empty(1).expand(boundary.inside_shape(x))
                cos, sin = rotary.angles(module, args, kwargs, inside)
                for angle in (cos, sin):
                    if angle is not None and angle.device != inside.device:
                        raise ValueError(f"cos and sin must be on x's device {inside.device}, got {angle.device}")
                check_call(shaped(as_computed(inside)[0], block)._replace(**documents), attention)
                if not torch.compiler.is_compiling():
                    attention.warn_undealt(x)

            refusal = boundary.refusal(x, out_dim, check)
            if refusal is not None:
                return returned.like(refusal)
            parts = parts_of(module, names)
            inside, leave = boundary.enter(x)
            tensors = as_computed(inside, *self._shards(module))
            options = attention.resolve(shaped(tensors[0], block))
            block_options = block._replace(gradients=needing_gradients(x, parts))
            y, _, _, number = metp_attention(
                *tensors, cos, sin, *documents.values(), block_options.told(), *options.told()[:-1]
            )
            y = watched(y, x, tensors[0], parts, f"{self.output}.bias", boundary.weights.name)
            return returned.like(leave(boundary.with_bias(y, linear(module, self.output).bias, number), number))

        return forward

    def _shards(self, module: nn.Module) -> list[Tensor | None]:
        """This rank's part of the weights, as the operator takes them."""
        projections = [linear(module, name) for name in self.projections]
        weights, biases = [local(p.weight) for p in projections], [local(p.bias) for p in projections]
        return self._in_order(weights, local(linear(module, self.output).weight), biases)

    def _in_order(
        self, weights: Sequence[Tensor | None], output: Tensor | None, biases: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        absent = [None] * (3 - len(weights))
        return [*weights, *absent, output, *biases, *absent]

    def _checked(self, module: nn.Module, heads: int, kv_heads: int, returned: Returned, device_type: str) -> Rotary:
        """How the module is handed its angles; compared first, on fewer heads than it has or, if it minds, on all."""
        rotary = self.rotary.of(module)
        # So long that a window of 1024 that stands in the module's code is seen, and those that the style was told.
        _, (length, _) = shortened(self.attention.options, None, 1)
        calls = self._calls(rotary, length)
        if not self.check:
            check_returns_one(module, type(self).__name__, ": leave check=False out, and give example=")
            return rotary if self.example is None else rotary.as_in(module, calls[0])
        dim = linear(module, self.projections[0]).in_features

        def trial(heads: tuple[int, int], dim: int) -> Callable[[], int]:
            return lambda: self._compared(module, rotary, heads, dim, length, returned, device_type)

        tried = [trial((2 * heads // kv_heads, 2), SMALL), trial((heads, kv_heads), SMALL)]
        if dim <= LARGEST:
            tried.append(trial((heads, kv_heads), dim))
        told = (
            heads, kv_heads, self.head_dim, *self.projections, self.output, self.attention.options,
            self.rotary.pairs, self.rotary.rotation, self.example,
        )  # fmt: skip
        agreed, returned.nones = once(
            self, module, told, device_type, lambda: (first_that_agrees(tried), returned.nones)
        )
        return rotary.as_in(module, calls[agreed])

    def _compared(
        self,
        module: nn.Module,
        rotary: Rotary,
        heads: tuple[int, int],
        dim: int,
        length: int,
        returned: Returned,
        device_type: str,
    ) -> int:
        """In which of the calls the module is what METP computes, with so many query heads and key heads."""
        H = self.head_dim
        rows = [n * H for n in (*heads, heads[1])]
        shapes = dict(zip(self.projections, rows if len(self.projections) == 3 else [sum(rows)], strict=True))
        by_name = {name: (n, dim) for name, n in shapes.items()} | {self.output: (dim, rows[0])}
        told = replace(
            self.attention.options,
            length=None,  # on one rank
            order=None,
            rotate="auto",
            rotate_forward="auto",
            schedule="2d",
            kernel="reference" if self.attention.options.softcap else "auto",  # in float64
        )
        alone = ContextAttention(options=told)
        block = BlockOptions(*heads, H, rotary.pairs or "", (1,), (0,), 0, "", "")

        def formula(inputs: Inputs, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
            x = inputs[""]
            weights = [inputs[f"{name}.weight"] for name in self.projections]
            biases = [inputs.get(f"{name}.bias") for name in self.projections]
            tensors = self._in_order(weights, inputs[f"{self.output}.weight"], biases)
            named = {name: value for name, value in kwargs.items() if name not in DOCUMENTS}
            found = rotary.as_in(module, (args, named)).angles(module, args, named, x)
            angles = (None if angle is None else angle.to(x.device) for angle in found)
            x, *tensors = as_computed(x, *tensors)
            options = alone.resolve(shaped(x, block))
            y, _, _, _ = metp_attention(x, *tensors, *angles, None, None, block.told(), *options.told()[:-1])
            bias = inputs.get(f"{self.output}.bias")
            return y if bias is None else y + bias.to(y.dtype)

        who, remedy = type(self).__name__, "give example=, or check=False"

        def trial(rows: int, length: int, large: Mapping[str, Tensor] | None = None) -> int:
            inputs, calls = small_inputs(module, by_name, (rows, length, dim), large), self._calls(rotary, length)
            are_large = large is not None
            return compare(module, who, inputs, calls, formula, device_type, remedy, returned, are_large=are_large)

        agreed = trial(1, length)
        for large in self._large(*heads):  # and rows of a batch that see each other show as well
            where_it_runs(lambda tokens, large=large: trial(2, tokens, large), length)
        return agreed

    def _calls(self, rotary: Rotary, length: int) -> list[Arguments]:
        """What the module is tried with after x, which leaves the random state as it is."""
        with torch.random.fork_rng([]):
            return list(rotary.examples(length)) if self.example is None else [self.example(length)]

    def _large(self, heads: int, kv_heads: int) -> Iterator[dict[str, Tensor]]:
        """By projection, factors of its rows: queries and keys are large by turns, so that scores stay as they are."""
        turns = torch.tensor([LARGE, 1 / LARGE], dtype=torch.float64, device="cpu")
        for by_head in [turns.repeat(kv_heads)[:kv_heads]] if kv_heads > 1 else turns[:, None]:
            some = by_head.repeat_interleave(heads // kv_heads), 1 / by_head, torch.full_like(by_head, LARGE)
            rows = [factors.repeat_interleave(self.head_dim) for factors in some]
            yield dict(zip(self.projections, rows if len(self.projections) == 3 else [torch.cat(rows)], strict=True))
