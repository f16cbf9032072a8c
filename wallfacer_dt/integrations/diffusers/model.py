"""A model of diffusers on a mesh: what is set, hooked and checked, and how it is undone.

Note [Tokens on the way]
A call of the model is that of one process: whole latents in, the whole output out, on every rank. Tokens are dealt out
where the model has made them of patches, rotary tables with them, and put together before it makes an image of them, by
forward hooks of the modules that give them. Every rank computes a part of what lies between, and nothing that comes
after it has parameters; so all gradients of parameters are parts of a sum. What attention needs to know goes with the
arguments of blocks: blocks that are computed again in a backward, after other forwards, find their own. Where a model
hands nothing down to attention that could tell it, attention asks which forward runs, and diffusers' own checkpoints
are told which that was; a block that others' checkpoints compute again is refused.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Unpack

import torch
from diffusers import ModelMixin
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from wallfacer_dt.agreement.agree import agree, refusing_together
from wallfacer_dt.compiler import untraced
from wallfacer_dt.integrations import adapters
from wallfacer_dt.integrations.diffusers.attend import ProcessorOnMesh
from wallfacer_dt.integrations.diffusers.inputs import compare_inputs
from wallfacer_dt.integrations.diffusers.plans import Plan, plan_of
from wallfacer_dt.integrations.diffusers.refusals import (
    attention_modules,
    attentions_of,
    check_model_is_known,
    check_model_may_run,
    token_modules,
    told_blocks,
    why_refused,
)
from wallfacer_dt.integrations.diffusers.sequence import PASSED, ForwardPass, RotaryTables, forward_of
from wallfacer_dt.integrations.handle import Handle, make_way
from wallfacer_dt.kernels.registry import check_kernel
from wallfacer_dt.mesh import context_groups, name_of
from wallfacer_dt.options import NOT_WAYS, AttentionKeywords, WayKeywords, ways_of, with_options
from wallfacer_dt.order import TokenOrder
from wallfacer_dt.sequence import unshard_sequence

_UNTRACED = "what is known of a forward is another at every call; with fullgraph=True use a style"


class ContextParallel(Handle[ModelMixin]):
    """A model that runs on a mesh, as :func:`context_parallel` has set it up.

    Args:
        model: of diffusers.
        plan: of its kind.
        mesh: context mesh.
        options: of attention that are the same at every call.
    """

    def __init__(self, model: ModelMixin, plan: Plan, mesh: DeviceMesh, options: AttentionKeywords) -> None:
        super().__init__(model)
        self.mesh, self._plan, self._order = mesh, plan, TokenOrder("contiguous", mesh)
        self._signature = inspect.signature(model.forward)
        self._forward: ForwardPass | None = None
        self._options = options
        self._hooked: dict[str, nn.Module] = {}
        self._told: set[nn.Module] = set()
        self._attends: Counter[str] = Counter()  # how often a forward calls each attention, by path
        self._turn_on(model)

    @contextmanager
    def whole(self) -> Iterator[ModelMixin]:
        """The model as it was, on one process, for as long as the context lasts.

        Yields:
            The model.

        Raises:
            ValueError: the model is gone, or is no longer set up by this.
        """
        model = self._set_up_model()
        with self._turned_off() if self._hooks else nullcontext():  # it is off within another such context
            yield model

    def _turn_on(self, model: ModelMixin) -> None:
        plan, modules = self._plan, attention_modules(model, self._plan)
        paths = {module: adapters.without_copies(path) for path, module in modules.items()}
        blocks = attentions_of(model, plan).values()
        self._attends = Counter(paths.get(x, path) for block in blocks for path, x in block.items())
        self._leave_on(model)
        for module in modules.values():
            on_mesh = ProcessorOnMesh(
                module.processor, self.mesh, self._options, plan, paths[module], lambda: self._forward
            )
            module.set_processor(on_mesh)
        at: dict[str, Callable[..., Any]] = {path: partial(self._deal, path) for path in token_modules(model, plan)}
        at[plan.output] = self._put_together
        if plan.rotary:
            at[plan.rotary] = self._deal_rotary
        told = told_blocks(model, plan)
        self._hooked = {path: model.get_submodule(path) for path in at}
        self._told = set(told.values())
        self._hooks = [
            model.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True),
            model.register_forward_hook(self._end, always_call=True),
            *(self._hooked[path].register_forward_hook(hook) for path, hook in at.items()),
            *(
                block.register_forward_pre_hook(partial(self._tell, path), with_kwargs=True)
                for path, block in told.items()
            ),
        ]

    def _turn_off(self, model: ModelMixin) -> None:
        self._remove_hooks()
        self._leave_checkpoints(model)
        for module in attention_modules(model, self._plan).values():
            if isinstance(module.processor, ProcessorOnMesh):
                module.set_processor(module.processor.processor)
        self._hooked, self._told, self._forward = {}, set(), None

    @untraced(_UNTRACED)
    def _begin(self, model: ModelMixin, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Before each forward: whether this is what was set up, and all ranks hold the same inputs."""
        self._forward = None
        self._leave_checkpoints(model)
        with refusing_together(name_of(self.mesh)):
            self._check_still_set_up(model)
            modules = attention_modules(model, self._plan)
            processors = {path: module.processor.processor for path, module in modules.items()}
            check_model_may_run(model, self._plan, processors)
            given = self._known(args, kwargs)
            forward = ForwardPass(self._order)
            if self._plan.is_joint:
                forward.text = _tokens(self._plan.text_given, given.get(self._plan.text_given))
                if self._plan.more_text:
                    forward.text += model.get_parameter(self._plan.more_text).shape[1]
            states = {}
            if adapters.draw_for_all(model):
                states[adapters.STATE] = adapters.random_state(self.mesh.device_type)
            compare_inputs(f"a forward of {type(model).__name__}", given | states, name_of(self.mesh))
            for name in self._plan.per_token & given.keys():
                shape = given[name].shape
                if shape[1:] not in ((), (1,)):
                    given[name] = forward.shard(given[name], 1, name)
                elif shape.numel() > given["hidden_states"].shape[0]:
                    raise ValueError(f"{name} must be (B,) or (B, N), got {tuple(shape)}")
            steps = given.get("timestep")
            is_of_images = not (self._plan.told_ndim or self._plan.per_token)
            if is_of_images and isinstance(steps, Tensor) and steps.ndim > 1:
                raise ValueError(f"timestep must be (B,), got {tuple(steps.shape)}")
            rotary = self._plan.rotary_given
            if rotary in given:
                tables = (forward.shard(table, 0, rotary) for table in given[rotary])
                given[rotary] = RotaryTables(tables, forward)
            elif rotary and not self._plan.keywords:
                raise ValueError(
                    f"the model was called without {rotary}, with which attention is told of a rank's tokens"
                )
        if self._plan.keywords:
            given[self._plan.keywords] = {PASSED: forward}
        if not self._plan.hands_down:
            own = partial(self._run_again, model._gradient_checkpointing_func, forward)
            model._gradient_checkpointing_func = own
        self._forward = forward
        return (), given

    def _run_again(
        self, checkpoint: Callable[..., Any], forward: ForwardPass, block: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """A block, checkpointed; where it is computed again, that is of its own forward."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before, self._forward = self._forward, forward
            try:
                return block(*args, **kwargs)
            finally:
                self._forward = before

        return checkpoint(run, *args, **kwargs)

    def _leave_checkpoints(self, model: ModelMixin) -> None:
        """As they were before a forward, which may have been interrupted."""
        func = getattr(model, "_gradient_checkpointing_func", None)
        while isinstance(func, partial) and getattr(func.func, "__self__", None) is self:
            func = model._gradient_checkpointing_func = func.args[0]

    @untraced(_UNTRACED)
    def _deal(self, path: str, module: nn.Module, args: Any, tokens: Tensor) -> Tensor:
        """This rank's tokens, of all (B, N, D), or (B, T + N, D); of a grid (B, D, ...) a line of as many dims."""
        del module, args
        forward, what = self._in_forward(), f"those that {path} gives"
        with refusing_together(name_of(self.mesh)):
            if self._plan.tokens_after_text:
                text, tokens = tokens.tensor_split([forward.text], 1)
                return torch.cat([text, forward.shard(tokens, 1, what)], 1)
            if tokens.ndim == 3:
                return forward.shard(tokens, 1, what)
            if self._plan.features_last:
                line = forward.shard(tokens.flatten(1, -2), 1, what)
                return line.view(*line.shape[:2], *(1,) * (tokens.ndim - 3), line.shape[2])
            line = forward.shard(tokens.flatten(2), 2, what)
        return line.view(*line.shape, *(1,) * (tokens.ndim - 3))

    @untraced(_UNTRACED)
    def _deal_rotary(self, module: nn.Module, args: Any, given: Any) -> Any:
        """Tables for the text, which is whole, and for this rank's tokens."""
        del module, args
        forward, dim = self._in_forward(), self._plan.rotary_dim
        tables = (given,) if isinstance(given, Tensor) else given
        with refusing_together(name_of(self.mesh)):
            where, is_first = self._plan.rotary_text, not forward.has_rotary
            forward.has_rotary = True
            if where == ("first call" if is_first else "next call"):
                return given
            apart = tables[-1:] if where == "last table" else ()
            parts = []
            for table in tables[: len(tables) - len(apart)]:
                start = forward.text if where == "first" else 0
                end = table.shape[dim] - (forward.text if where == "last" else 0)
                text, tokens, after = table.tensor_split([start, end], dim)
                tokens = forward.shard(tokens, dim, f"the tables of {self._plan.rotary}")
                parts.append(torch.cat([text, tokens, after], dim))
        if not self._plan.hands_down:
            return parts[0] if isinstance(given, Tensor) else (*parts, *apart)
        return RotaryTables((*parts, *apart), forward)

    @untraced(_UNTRACED)
    def _tell(self, path: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Before a block, also where it is computed again: what it is told of all tokens, of this rank's."""
        given, plan = inspect.signature(block.forward).bind(*args, **kwargs).arguments, self._plan
        with refusing_together(name_of(self.mesh)):
            running = None if plan.hands_down and path != plan.told_after else self._forward
            forward = forward_of((*given.values(), running), path)
            for name in plan.told_in_blocks:
                told = given[name]
                if isinstance(told, tuple):
                    tables, of_text = told
                    given[name] = tuple(forward.shard(table, 0, name) for table in tables), of_text
                elif not isinstance(told, Tensor):
                    given[name] = forward.among_own(told)
                elif told.ndim == (plan.told_ndim or told.ndim):
                    given[name] = forward.shard(told, 1, name)
            if plan.tokens_in_blocks and f"{path}.".startswith(f"{plan.blocks[0]}.0."):
                first = next(iter(given))
                given[first] = forward.shard(given[first], 1, f"those that {path} is given")
        return (), given

    @untraced(_UNTRACED)
    def _put_together(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Of every rank's tokens all of them, on every rank; of their gradients the sum."""
        del module, args
        forward = self._in_forward()
        forward.gathered = True
        if self._plan.output_before_text:
            return unshard_sequence(output[: len(output) - forward.text], self._order, dim=0, grad=True)
        return unshard_sequence(output, self._order, dim=1, grad=True)

    @untraced(_UNTRACED)
    def _end(self, model: ModelMixin, args: Any, output: Any) -> None:
        """After each forward: whether attention was computed where it should be."""
        del args
        forward, self._forward = self._forward, None
        self._leave_checkpoints(model)
        if forward is None or output is None:  # it has raised
            return
        with refusing_together(name_of(self.mesh)):
            name, calls, expected = type(model).__name__, forward.calls, self._attends
            wrong = [path for path in expected | calls if calls[path] != expected[path]]
            if wrong:
                raise ValueError(
                    f"{wrong[0]} of {name} computed attention on the mesh {calls[wrong[0]]} times, where "
                    f"{expected[wrong[0]]} are expected: leave blocks as context_parallel has seen them"
                )
            if not forward.gathered:
                raise ValueError(f"the output of {name} was not put together")

    def _in_forward(self) -> ForwardPass:
        if self._forward is None:
            with refusing_together(name_of(self.mesh)):
                raise ValueError(
                    "a part of the model that context_parallel was given was called by itself, or of a copy: call that "
                    "model"
                )
        return self._forward

    def _check_still_set_up(self, model: ModelMixin) -> None:
        self._check_is_of(model)
        for path, module in attention_modules(model, self._plan).items():
            if not isinstance(module.processor, ProcessorOnMesh) or module.processor.mesh is not self.mesh:
                raise ValueError(
                    f"the attention processor of {path} is another than context_parallel has set: call remove() before "
                    "you set another, and context_parallel afterwards"
                )
        for path, module in self._hooked.items():
            if model.get_submodule(path) is not module:
                raise ValueError(
                    f"{path} is another module than context_parallel has seen: call it after adapters are added"
                )
        for path, block in told_blocks(model, self._plan).items():
            if block not in self._told:
                raise ValueError(
                    f"{path} is told of tokens, and is no module that context_parallel has seen: call it after blocks "
                    "are copied, as peft's modules_to_save does"
                )

    def _known(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments of a call by name, or a refusal (ValueError) of what is not known to be right on a shard."""
        given, parameters = {**self._signature.bind(*args, **kwargs).arguments}, self._signature.parameters
        for name, value in given.items():
            if name in self._plan.takes or name == "return_dict":
                continue
            if isinstance(value, Tensor) or value not in (None, False, {}, parameters[name].default):
                raise ValueError(f"the model was called with {name}, which is not implemented: {why_refused(name)}")
        return {name: x for name, x in given.items() if x is not None or parameters[name].default is not None}


def context_parallel(model: ModelMixin, mesh: DeviceMesh, **options: Unpack[WayKeywords]) -> ContextParallel:
    """Have a diffusion transformer of diffusers compute on a mesh. The model is edited nowhere; all ranks call it.

    Every rank calls the model as one process would, with the same inputs, and gets the whole output. Gradients are
    those of the sum of what ranks compute of it: where each of P ranks has the same loss, average gradients over ranks,
    or divide the loss by P where they are summed. A second call on a model takes the place of the first.

    Args:
        model: of a kind that is known, as DiT, SD3, Flux, Qwen-Image, Z-Image or Wan, before or after
            ``fully_shard``; it is called as a whole.
        mesh: context mesh; see :func:`context_mesh`.
        **options: ``schedule``, ``rotate``, ``rotate_forward`` and ``kernel``, as :class:`AttentionOptions` has them;
            what else is an option there, the model says.

    Returns:
        A handle: ``remove()`` undoes it, ``whole()`` is a context in which the model runs as before.

    Raises:
        TypeError: the model is not diffusers', or an option of the wrong type.
        ValueError: a model that is not known, or in which more than attention looks at several tokens; a mesh or option
            that does not fit, or differs between ranks.
    """
    name = name_of(mesh)
    with refusing_together(name):
        if not isinstance(model, ModelMixin):
            raise TypeError(f"model must be a ModelMixin of diffusers, got {type(model).__name__}")
        ways = ways_of("context_parallel", options)
        check_kernel(ways["kernel"])
        context_groups(mesh)
        plan = plan_of(model)
        told = {**ways, "model": type(model).__name__, "modules": len(list(model.modules()))}
        agree("context_parallel", told.items(), name)
    make_way(model, name)
    with refusing_together(name):
        check_model_is_known(model, plan)
        return ContextParallel(model, plan, mesh, ways)


context_parallel.__signature__ = with_options(context_parallel, NOT_WAYS)  # pyrefly: ignore[missing-attribute]


def _tokens(name: str, text: Any) -> int:
    if not isinstance(text, Tensor) or text.ndim not in (3, 4):
        said = "the text (B, T, D), or of K layers (B, T, K, D), that attention sees beside the image"
        raise ValueError(f"{name} must be {said}")
    return text.shape[1]
