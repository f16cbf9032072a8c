"""In place of a module's attention processor: the same one, whose attention is computed on a mesh.

Note [Processors]
A processor projects, normalises and rotates tokens, and then calls ``scaled_dot_product_attention`` once. It is run as
it is, and that one call is replaced, which a mode of torch functions sees; so nothing of a processor is written here a
second time, and the queries that are attended are its own. A processor that computes attention otherwise, as with
another of diffusers' backends, is refused: no call was seen.

Note [Masked text]
Where some of a sample's text is padding, attention is computed of the other tokens only, of samples alike together: its
kernels see no mask, and ranks send no more bytes, but those of each kind of sample by themselves. What it gives for
padding is zero, where a processor would compute it: nothing looks at that, neither attention as a key nor what comes
after the blocks.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from wallfacer_dt.agreement.agree import refusing_together
from wallfacer_dt.agreement.progress import Within
from wallfacer_dt.attention import context_parallel_attention
from wallfacer_dt.compiler import untraced
from wallfacer_dt.integrations.diffusers.plans import Plan
from wallfacer_dt.integrations.diffusers.sequence import ForwardPass, Texts, forward_of
from wallfacer_dt.mesh import name_of
from wallfacer_dt.options import AttentionKeywords

_TOKENS = 2  # the dim of tokens in (B, N, L, H)


@dataclass(eq=False)
class ProcessorOnMesh:
    """See Note [Processors].

    Attributes:
        processor: diffusers' own.
        mesh: context mesh.
        options: of attention that are the same at every call.
        plan: of the model.
        path: of the module, by which its calls are counted and messages name it.
        running: gives the forward that runs, if any; asked where models hand none down.
    """

    processor: Any
    mesh: DeviceMesh
    options: AttentionKeywords
    plan: Plan
    path: str
    running: Callable[[], ForwardPass | None]

    def __new__(cls, *given: Any, **named: Any) -> "ProcessorOnMesh":
        """Refuse (ValueError) to be made of nothing, as diffusers does where an IP-Adapter comes or goes."""
        if not given and not named:
            raise ValueError(
                "a model's attention is on a mesh, on which there are no IP-Adapters: call remove() before you load "
                "or unload one"
            )
        return super().__new__(cls)

    @property
    def _attention_backend(self) -> Any:
        """The processor's; which diffusers sets."""
        return self.processor._attention_backend

    @_attention_backend.setter
    def _attention_backend(self, backend: Any) -> None:
        if backend not in (None, "native"):
            raise ValueError(
                f"{self.path} attends on a mesh, by the kernel that context_parallel was given, kernel=...: call "
                "remove() before you set an attention backend of diffusers"
            )
        self.processor._attention_backend = backend

    @untraced("it looks process groups up; in a compiled model use a style")
    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        *args: Any,
        sharded_sequence: ForwardPass | None = None,
        # Names of keywords, which diffusers reads here to hand no others down.
        image_rotary_emb: Any = None,
        encoder_hidden_states_mask: Any = None,
        freqs_cis: Any = None,
        kv_cache: Any = None,
        **kwargs: Any,
    ) -> Any:
        """As diffusers calls a processor. Cross attention is as it was: a rank's tokens see all of the text here."""
        named = {"image_rotary_emb": image_rotary_emb, "encoder_hidden_states_mask": encoder_hidden_states_mask,
                 "freqs_cis": freqs_cis, "kv_cache": kv_cache}  # fmt: skip
        kwargs |= {name: x for name, x in named.items() if x is not None}
        given = attn, hidden_states, *args
        known = _signature(type(self.processor)).bind(self.processor, *given, **kwargs).arguments
        if known.get("encoder_hidden_states") is hidden_states:
            del known["encoder_hidden_states"]  # what a token sees are tokens, which some say so
        text = known.get("encoder_hidden_states")
        if self.plan.text == "cross" and text is not None:
            return self.processor(*given, **kwargs)
        with refusing_together(name_of(self.mesh)):
            running = None if self.plan.hands_down else self.running()
            forward = forward_of((sharded_sequence, *args, *kwargs.values(), running), self.path)
            joined = forward.text if self.plan.is_joined(self.path) else 0
            tokens = joined if text is None else text.shape[1]
            mode = _Attending(self, forward, tokens, self._texts(forward, tokens, len(hidden_states), known))
        with mode:
            out = self.processor(*given, **kwargs)
        with refusing_together(name_of(self.mesh)):
            if mode.calls != 1:
                raise ValueError(
                    f"{self.path} called scaled_dot_product_attention {mode.calls} times, where once is expected: set "
                    'attention_backend "native", and leave processors as they are'
                )
        forward.calls[self.path] += 1
        return out

    def __copy__(self) -> "ProcessorOnMesh":
        """Likewise."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "ProcessorOnMesh":
        """Nothing of it changes; a copy of the model refuses to be called."""
        return self

    def _texts(self, forward: ForwardPass, tokens: int, batch: int, known: Mapping[str, Any]) -> Texts | None:
        """Of the text's mask, if there is one; or a refusal (ValueError) of what this model is known not to have."""
        if known.get("encoder_hidden_states") is not None and self.plan.text == "none":
            raise ValueError(f"{self.path} was called with encoder_hidden_states, of which this model is known to have "
                             "none")  # fmt: skip
        masks = {name: known.get(name) for name in ("attention_mask", "encoder_hidden_states_mask")}
        mask = masks.pop(self.plan.text_mask, None)
        if others := [name for name, other in masks.items() if other is not None]:
            raise ValueError(f"{self.path} was called with {others[0]}, which would be of one rank's tokens")
        if mask is None:
            return None
        start = 0 if self.plan.text == "before" else mask.shape[-1] - tokens
        return forward.texts(mask, slice(start, start + tokens), batch, self.path)


@lru_cache(maxsize=64)
def _signature(kind: type) -> inspect.Signature:
    """What a kind of processor takes, which have no one order of it."""
    return inspect.signature(kind.__call__)


class _Attending(TorchFunctionMode):
    """The one call of scaled_dot_product_attention, on the mesh."""

    def __init__(self, on: ProcessorOnMesh, forward: ForwardPass, text: int, texts: Texts | None) -> None:
        super().__init__()
        self.on, self.forward, self.text, self.texts, self.calls = on, forward, text, texts, 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        del types
        return (self._attend if func is F.scaled_dot_product_attention else func)(*args, **kwargs or {})

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        del enable_gqa  # heads of keys are never expanded
        self.calls += 1
        with refusing_together(name_of(self.on.mesh)):
            is_masked = attn_mask is not None and self.texts is None
            asked = {"attn_mask": is_masked, "dropout_p": bool(dropout_p), "is_causal": is_causal}
            if refused := [name for name, is_asked in asked.items() if is_asked]:
                raise ValueError(f"{self.on.path} calls attention with {refused[0]}, which is not implemented here")
        if key.shape[_TOKENS] > query.shape[_TOKENS]:  # text that asks nothing: what its rows are given nobody wants
            query = self._together(query.new_zeros(*query.shape[:_TOKENS], self.text, query.shape[-1]), query)
            return self._parts(self._attend_all(query, key, value, scale))[1]
        return self._attend_all(query, key, value, scale)

    def _attend_all(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Of the text's rows and the image's."""
        compute = partial(
            context_parallel_attention, mesh=self.on.mesh, scale=scale, length=self.forward.length, **self.on.options
        )
        with Within(self.on.path):
            if self.texts and self.texts.alike:
                return self._of_valid(compute, query, key, value)
            if self.on.plan.text == "before" or not self.text:
                return compute(query, key, value, replicated=self.text)
            # The text's rows are the first to attention on a mesh.
            own = (torch.cat(self._parts(x), _TOKENS) for x in (query, key, value))
            return self._together(*compute(*own, replicated=self.text).tensor_split([self.text], _TOKENS))

    def _of_valid(self, compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """See Note [Masked text]."""
        assert self.texts is not None
        outs = []
        for one in self.texts.alike:
            own = []
            for text, image in map(self._parts, tensors):
                if one.samples is not None:
                    text, image = text.index_select(0, one.samples), image.index_select(0, one.samples)
                own.append(torch.cat([text.index_select(_TOKENS, one.tokens), image], _TOKENS))
            valid, image = compute(*own, replicated=len(one.tokens)).tensor_split([len(one.tokens)], _TOKENS)
            text = valid.new_zeros(*valid.shape[:_TOKENS], self.text, valid.shape[-1])
            outs.append(self._together(text.index_copy(_TOKENS, one.tokens, valid), image))
        return outs[0] if self.texts.back is None else torch.cat(outs).index_select(0, self.texts.back)

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The text's rows and the image's."""
        if self.on.plan.text == "before":
            return x[:, :, : self.text], x[:, :, self.text :]
        image = x.shape[_TOKENS] - self.text
        return x[:, :, image:], x[:, :, :image]

    def _together(self, text: Tensor, image: Tensor) -> Tensor:
        """In the order that the processor has them."""
        return torch.cat([text, image] if self.on.plan.text == "before" else [image, text], _TOKENS)
