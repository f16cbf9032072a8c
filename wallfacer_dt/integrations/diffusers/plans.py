"""Where the tokens of each model of diffusers are made, attended and turned into an image again.

Tokens are dealt out where they have just been made of patches, and with them whatever has a place for every token; they
are put together before patches become an image. Between the two all but attention looks at tokens one by one. Read off
the sources of diffusers 0.41.0 to 0.42.1.
"""

from dataclasses import dataclass
from typing import Any, Literal

from diffusers import (
    AuraFlowTransformer2DModel,
    BriaFiboTransformer2DModel,
    BriaTransformer2DModel,
    ChromaTransformer2DModel,
    ChronoEditTransformer3DModel,
    CogVideoXTransformer3DModel,
    CogView3PlusTransformer2DModel,
    CogView4Transformer2DModel,
    ConsisIDTransformer3DModel,
    CosmosTransformer3DModel,
    DiTTransformer2DModel,
    ErnieImageTransformer2DModel,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    GlmImageTransformer2DModel,
    HunyuanDiT2DModel,
    HunyuanImageTransformer2DModel,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoTransformer3DModel,
    JoyImageEditTransformer3DModel,
    Krea2Transformer2DModel,
    LongCatImageTransformer2DModel,
    LTXVideoTransformer3DModel,
    Lumina2Transformer2DModel,
    ModelMixin,
    OvisImageTransformer2DModel,
    PixArtTransformer2DModel,
    PRXTransformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    SkyReelsV2Transformer3DModel,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
    ZImageTransformer2DModel,
)
from diffusers.models.attention_processor import (
    AttnProcessor2_0,
    AuraFlowAttnProcessor2_0,
    CogVideoXAttnProcessor2_0,
    FusedAttnProcessor2_0,
    FusedCogVideoXAttnProcessor2_0,
    FusedHunyuanAttnProcessor2_0,
    FusedJointAttnProcessor2_0,
    HunyuanAttnProcessor2_0,
    JointAttnProcessor2_0,
)
from diffusers.models.transformers.transformer_bria import BriaAttnProcessor
from diffusers.models.transformers.transformer_bria_fibo import BriaFiboAttnProcessor
from diffusers.models.transformers.transformer_chronoedit import WanAttnProcessor as ChronoEditAttnProcessor
from diffusers.models.transformers.transformer_cogview4 import CogView4AttnProcessor
from diffusers.models.transformers.transformer_cosmos import CosmosAttnProcessor2_0, CosmosAttnProcessor2_5
from diffusers.models.transformers.transformer_ernie_image import ErnieImageSingleStreamAttnProcessor
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from diffusers.models.transformers.transformer_flux2 import Flux2AttnProcessor, Flux2ParallelSelfAttnProcessor
from diffusers.models.transformers.transformer_glm_image import GlmImageAttnProcessor
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15AttnProcessor2_0
from diffusers.models.transformers.transformer_hunyuanimage import HunyuanImageAttnProcessor
from diffusers.models.transformers.transformer_joyimage import JoyImageAttnProcessor
from diffusers.models.transformers.transformer_krea2 import Krea2AttnProcessor
from diffusers.models.transformers.transformer_longcat_image import LongCatImageAttnProcessor
from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor
from diffusers.models.transformers.transformer_lumina2 import Lumina2AttnProcessor2_0
from diffusers.models.transformers.transformer_ovis_image import OvisImageAttnProcessor
from diffusers.models.transformers.transformer_prx import PRXAttnProcessor2_0
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
from diffusers.models.transformers.transformer_skyreels_v2 import SkyReelsV2AttnProcessor
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from diffusers.models.transformers.transformer_z_image import ZSingleStreamAttnProcessor

try:
    from diffusers import Flux3Transformer2DModel
    from diffusers.models.transformers.transformer_flux3 import Flux3AttnProcessor
except ImportError:  # diffusers 0.41 has none
    Flux3Transformer2DModel = Flux3AttnProcessor = None  # pyrefly: ignore[bad-assignment]

Text = Literal["none", "cross", "before", "after"]

PROCESSORS = {
    AttnProcessor2_0, FusedAttnProcessor2_0, JointAttnProcessor2_0, FusedJointAttnProcessor2_0, FluxAttnProcessor,
    WanAttnProcessor, LTXVideoAttnProcessor, QwenDoubleStreamAttnProcessor2_0, Flux2AttnProcessor,
    Flux2ParallelSelfAttnProcessor, CogVideoXAttnProcessor2_0, FusedCogVideoXAttnProcessor2_0,
    HunyuanVideoAttnProcessor2_0, HunyuanVideo15AttnProcessor2_0, BriaAttnProcessor, BriaFiboAttnProcessor,
    CogView4AttnProcessor, FusedHunyuanAttnProcessor2_0, GlmImageAttnProcessor, HunyuanAttnProcessor2_0,
    HunyuanImageAttnProcessor, Krea2AttnProcessor, LongCatImageAttnProcessor, OvisImageAttnProcessor,
    AuraFlowAttnProcessor2_0, PRXAttnProcessor2_0, ErnieImageSingleStreamAttnProcessor, JoyImageAttnProcessor,
    Lumina2AttnProcessor2_0, ZSingleStreamAttnProcessor, ChronoEditAttnProcessor,
    SkyReelsV2AttnProcessor, CosmosAttnProcessor2_0, CosmosAttnProcessor2_5, *filter(None, [Flux3AttnProcessor]),
}  # fmt: skip
"""Attention processors that compute projections token by token, and one attention by scaled_dot_product_attention."""


@dataclass(frozen=True)
class Plan:
    """One kind of model.

    Attributes:
        kind: its class.
        takes: arguments of a call that are known; of others it is not known what they do with tokens.
        blocks: lists of blocks, in order.
        attends: the attention of a block in which the image's tokens see each other; some blocks lack the second.
        tokens: modules that give tokens (B, N, D), or a grid of them (B, D, ...); some models lack the second.
        output: the module that gives every token's part of the image, (B, N, C).
        text: whether attention has none; sees it by cross attention; or together with the image, before it or after.
        features_last: whether a grid is (B, ..., D).
        tokens_after_text: whether modules of tokens give (B, T + N, D), the text before the image.
        tokens_in_blocks: whether text and image are one sequence, dealt out where the first block is given it; there
            is no module of tokens then.
        output_before_text: whether the output is (N + T, B, C), the text after the image.
        alone: lists of blocks in which the image's tokens see each other only, where those of others see text as well.
        text_given: the argument of a call that has the text.
        more_text: a parameter (1, R, D) of tokens that every text is given beside its own.
        text_mask: the argument by which attention is told which tokens of the text it sees.
        keywords: the argument of a call that is handed down to attention; where there is none, that is
        rotary: the module whose tables are handed down to it,
        rotary_dim: and the dim of their tokens;
        rotary_text: where those of text in joint attention are: nowhere, first, last, in a last table, or what the
            module is called for after the image, or before it.
        rotary_given: in place of the module, the argument of a call that has the image's tables (N, H).
        per_token: arguments that may be (B, N), with a value for every token.
        hands_down: whether the model hands anything down to attention from which that learns of which forward it is;
            where it does not, it is of the one that runs.
        told_in_blocks: arguments of blocks that are (B, N, ...) likewise, or a pair of the image's tables and the
            text's, or say how many tokens come first;
        told_ndim: how many dims they have where they are of tokens; 0 where they always are.
        told_if: an option of the config, and its value, with which blocks are given them; else they always are.
        told_after: a module after the blocks that is given them, too.
        only: options of the config, and of each the one value that is known.
    """

    kind: type[ModelMixin]
    takes: frozenset[str]
    blocks: tuple[str, ...]
    attends: tuple[str, ...]
    tokens: tuple[str, ...]
    output: str
    text: Text
    features_last: bool = False
    tokens_after_text: bool = False
    tokens_in_blocks: bool = False
    output_before_text: bool = False
    alone: tuple[str, ...] = ()
    text_given: str = "encoder_hidden_states"
    more_text: str = ""
    text_mask: str = ""
    keywords: str = ""
    rotary: str = ""
    rotary_dim: int = 0
    rotary_text: Literal["nowhere", "first", "last", "last table", "next call", "first call"] = "nowhere"
    rotary_given: str = ""
    per_token: frozenset[str] = frozenset()
    hands_down: bool = True
    told_in_blocks: tuple[str, ...] = ()
    told_ndim: int = 0
    told_if: tuple[str, Any] = ("", None)
    told_after: str = ""
    only: tuple[tuple[str, Any], ...] = ()

    def is_joined(self, path: str) -> bool:
        """Whether attention, by its path, that is given tokens only is given those of text among them."""
        return (self.text == "before" or self.output_before_text) and not any(
            f".{name}." in f".{path}." for name in self.alone
        )

    @property
    def is_joint(self) -> bool:
        """Whether attention sees text and image together."""
        return self.text in ("before", "after")


_AS_FLUX: dict[str, Any] = {
    "blocks": ("transformer_blocks", "single_transformer_blocks"), "attends": ("attn",), "tokens": ("x_embedder",),
    "output": "proj_out", "text": "before", "rotary": "pos_embed", "rotary_text": "first",
}  # fmt: skip

PLANS = (
    Plan(
        DiTTransformer2DModel, frozenset({"hidden_states", "timestep", "class_labels"}), ("transformer_blocks",),
        ("attn1",),
        tokens=("pos_embed",), output="proj_out_2", text="none", keywords="cross_attention_kwargs",
    ),
    Plan(
        PixArtTransformer2DModel,
        frozenset({"hidden_states", "encoder_hidden_states", "timestep", "added_cond_kwargs",
                   "encoder_attention_mask"}),
        ("transformer_blocks",), ("attn1",), tokens=("pos_embed",), output="proj_out", text="cross",
        keywords="cross_attention_kwargs",
    ),
    Plan(
        SD3Transformer2DModel,
        frozenset({"hidden_states", "encoder_hidden_states", "pooled_projections", "timestep"}),
        ("transformer_blocks",), ("attn", "attn2"), tokens=("pos_embed",), output="proj_out", text="after",
        keywords="joint_attention_kwargs",
    ),
    Plan(
        FluxTransformer2DModel,
        frozenset({"hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "img_ids", "txt_ids",
                   "guidance"}),
        **_AS_FLUX,
    ),
    Plan(
        Flux2Transformer2DModel,
        frozenset({"hidden_states", "encoder_hidden_states", "timestep", "img_ids", "txt_ids", "guidance"}),
        ("transformer_blocks", "single_transformer_blocks"), ("attn",), tokens=("x_embedder",), output="proj_out",
        text="before", keywords="joint_attention_kwargs", rotary="pos_embed", rotary_text="next call",
    ),
    Plan(
        WanTransformer3DModel,
        frozenset({"hidden_states", "timestep", "encoder_hidden_states", "encoder_hidden_states_image"}),
        ("blocks",), ("attn1",), tokens=("patch_embedding",), output="proj_out", text="cross", rotary="rope",
        rotary_dim=1, per_token=frozenset({"timestep"}),
    ),
    Plan(
        WanVACETransformer3DModel,
        frozenset({"hidden_states", "timestep", "encoder_hidden_states", "encoder_hidden_states_image",
                   "control_hidden_states", "control_hidden_states_scale"}),
        ("blocks", "vace_blocks"), ("attn1",), tokens=("patch_embedding", "vace_patch_embedding"), output="proj_out",
        text="cross", rotary="rope", rotary_dim=1,
    ),
    Plan(
        LTXVideoTransformer3DModel,
        frozenset({"hidden_states", "encoder_hidden_states", "timestep", "encoder_attention_mask", "num_frames",
                   "height", "width", "rope_interpolation_scale", "video_coords"}),
        ("transformer_blocks",), ("attn1",), tokens=("proj_in",), output="proj_out", text="cross", rotary="rope",
        rotary_dim=1, per_token=frozenset({"timestep"}),
    ),
    Plan(
        QwenImageTransformer2DModel,
        frozenset({"hidden_states", "encoder_hidden_states", "encoder_hidden_states_mask", "timestep", "img_shapes",
                   "additional_t_cond"}),
        ("transformer_blocks",), ("attn",), tokens=("img_in",), output="proj_out", text="before",
        text_mask="encoder_hidden_states_mask", rotary="pos_embed", rotary_text="last table",
        told_in_blocks=("modulate_index",), told_if=("zero_cond_t", True),
    ),
    Plan(
        HunyuanVideoTransformer3DModel,
        frozenset({"hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask",
                   "pooled_projections", "guidance"}),
        ("transformer_blocks", "single_transformer_blocks"), ("attn",), tokens=("x_embedder",), output="proj_out",
        text="after", text_mask="attention_mask", rotary="rope", told_in_blocks=("num_tokens",),
        told_if=("image_condition_type", "token_replace"),
    ),
    Plan(
        HunyuanVideo15Transformer3DModel,
        frozenset({"hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask", "timestep_r",
                   "encoder_hidden_states_2", "encoder_attention_mask_2", "image_embeds"}),
        ("transformer_blocks",), ("attn",), tokens=("x_embedder",), output="proj_out", text="after",
        text_mask="attention_mask", rotary="rope",
    ),
    Plan(
        CogVideoXTransformer3DModel,
        frozenset({"hidden_states", "encoder_hidden_states", "timestep", "timestep_cond", "ofs", "image_rotary_emb"}),
        ("transformer_blocks",), ("attn1",), tokens=("patch_embed",), output="proj_out", text="before",
        tokens_after_text=True, keywords="attention_kwargs", rotary_given="image_rotary_emb",
    ),
    Plan(
        ChromaTransformer2DModel,
        frozenset({"hidden_states", "encoder_hidden_states", "timestep", "img_ids", "txt_ids"}),
        **_AS_FLUX,
    ),
    Plan(
        LongCatImageTransformer2DModel,
        frozenset({"hidden_states", "encoder_hidden_states", "timestep", "img_ids", "txt_ids", "guidance"}),
        **_AS_FLUX,
    ),
    Plan(
        OvisImageTransformer2DModel,
        frozenset({"hidden_states", "encoder_hidden_states", "timestep", "img_ids", "txt_ids"}),
        **_AS_FLUX,
    ),
    Plan(
        BriaTransformer2DModel,
        frozenset({"hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "img_ids", "txt_ids"}),
        **_AS_FLUX,
    ),
    Plan(
        BriaFiboTransformer2DModel,
        frozenset({"hidden_states", "encoder_hidden_states", "text_encoder_layers", "pooled_projections", "timestep",
                   "img_ids", "txt_ids", "guidance"}),
        **_AS_FLUX,
    ),
    Plan(
        CogView4Transformer2DModel,
        frozenset({"hidden_states", "encoder_hidden_states", "timestep", "original_size", "target_size",
                   "crop_coords"}),
        ("transformer_blocks",), ("attn1",), tokens=("patch_embed.proj",), output="proj_out", text="before",
        rotary="rope",
    ),
    Plan(
        GlmImageTransformer2DModel,
        frozenset({"hidden_states", "encoder_hidden_states", "prior_token_id", "prior_token_drop", "timestep",
                   "target_size", "crop_coords"}),
        ("transformer_blocks",), ("attn1",), tokens=("image_projector", "prior_projector"), output="proj_out",
        text="before", rotary="rope",
    ),
    Plan(
        HunyuanImageTransformer2DModel,
        frozenset({"hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask", "timestep_r",
                   "encoder_hidden_states_2", "encoder_attention_mask_2", "guidance"}),
        ("transformer_blocks", "single_transformer_blocks"), ("attn",), tokens=("x_embedder",), output="proj_out",
        text="after", text_mask="attention_mask", rotary="rope",
    ),
    Plan(
        HunyuanDiT2DModel,
        frozenset({"hidden_states", "timestep", "encoder_hidden_states", "text_embedding_mask",
                   "encoder_hidden_states_t5", "text_embedding_mask_t5", "image_meta_size", "style",
                   "image_rotary_emb"}),
        ("blocks",), ("attn1",), tokens=("pos_embed",), output="proj_out", text="cross",
        rotary_given="image_rotary_emb",
    ),
    Plan(
        Krea2Transformer2DModel,
        frozenset({"hidden_states", "encoder_hidden_states", "timestep", "position_ids", "encoder_attention_mask"}),
        ("transformer_blocks",), ("attn",), tokens=("img_in",), output="final_layer", text="before",
        text_mask="attention_mask", rotary="rotary_emb", rotary_text="first",
    ),
    Plan(
        CogView3PlusTransformer2DModel,
        frozenset({"hidden_states", "encoder_hidden_states", "timestep", "original_size", "target_size",
                   "crop_coords"}),
        ("transformer_blocks",), ("attn1",), tokens=("patch_embed",), output="proj_out", text="before",
        tokens_after_text=True, hands_down=False,
    ),
    Plan(
        AuraFlowTransformer2DModel, frozenset({"hidden_states", "encoder_hidden_states", "timestep"}),
        ("joint_transformer_blocks", "single_transformer_blocks"), ("attn",), tokens=("pos_embed",), output="proj_out",
        text="before", more_text="register_tokens", hands_down=False,
    ),
    Plan(
        PRXTransformer2DModel, frozenset({"hidden_states", "timestep", "encoder_hidden_states", "attention_mask"}),
        ("blocks",), ("attention",), tokens=("img_in",), output="final_layer", text="before",
        text_mask="attention_mask", rotary="pe_embedder", rotary_dim=2, hands_down=False,
    ),
    Plan(
        ErnieImageTransformer2DModel, frozenset({"hidden_states", "timestep", "text_bth", "text_lens"}),
        ("layers",), ("self_attention",), tokens=("x_embedder",), output="final_linear", output_before_text=True,
        text="after", text_given="text_bth", text_mask="attention_mask", rotary="pos_embed", rotary_dim=1,
        rotary_text="last", hands_down=False,
    ),
    Plan(
        JoyImageEditTransformer3DModel, frozenset({"hidden_states", "timestep", "encoder_hidden_states"}),
        ("double_blocks",), ("attn",), tokens=("img_in",), output="proj_out", text="after",
        told_in_blocks=("image_rotary_emb",), hands_down=False,
    ),
    Plan(
        Lumina2Transformer2DModel,
        frozenset({"hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask"}),
        ("layers",), ("attn",), tokens=(), tokens_in_blocks=True, output="norm_out", text="none",
        told_in_blocks=("image_rotary_emb",), hands_down=False,
    ),
    Plan(
        ZImageTransformer2DModel, frozenset({"x", "t", "cap_feats"}),
        ("layers",), ("attention",), tokens=(), tokens_in_blocks=True, output="all_final_layer.2-1", text="none",
        told_in_blocks=("freqs_cis",), hands_down=False,
    ),
    Plan(
        ChronoEditTransformer3DModel,
        frozenset({"hidden_states", "timestep", "encoder_hidden_states", "encoder_hidden_states_image"}),
        ("blocks",), ("attn1",), tokens=("patch_embedding",), output="proj_out", text="cross", rotary="rope",
        rotary_dim=1, per_token=frozenset({"timestep"}),
    ),
    Plan(
        SkyReelsV2Transformer3DModel,
        frozenset({"hidden_states", "timestep", "encoder_hidden_states", "encoder_hidden_states_image", "fps"}),
        ("blocks",), ("attn1",), tokens=("patch_embedding",), output="proj_out", text="cross", rotary="rope",
        rotary_dim=1, only=(("num_frame_per_block", 1),),
    ),
    Plan(
        ConsisIDTransformer3DModel,
        frozenset({"hidden_states", "encoder_hidden_states", "timestep", "timestep_cond", "image_rotary_emb",
                   "id_cond", "id_vit_hidden"}),
        ("transformer_blocks",), ("attn1",), tokens=("patch_embed",), output="proj_out", text="before",
        tokens_after_text=True, rotary_given="image_rotary_emb",
    ),
    Plan(
        CosmosTransformer3DModel,
        frozenset({"hidden_states", "timestep", "encoder_hidden_states", "attention_mask", "fps", "condition_mask",
                   "padding_mask"}),
        ("transformer_blocks",), ("attn1",), tokens=("patch_embed", "learnable_pos_embed"), features_last=True,
        output="proj_out", text="cross", rotary="rope", told_in_blocks=("embedded_timestep", "temb"), told_ndim=3,
        told_after="norm_out",
    ),
    *([Plan(
        Flux3Transformer2DModel,
        frozenset({"hidden_states", "encoder_hidden_states", "timestep", "img_ids", "txt_ids", "target_timestep"}),
        ("mode_blocks.image", "single_transformer_blocks"), ("attn",),
        tokens=("x_embedders.image", "early_stream_modulations.image", "single_stream_modulations.image",
                "norm_out.linear"),
        output="proj_out", text="before", alone=("mode_blocks.image",), rotary="pos_embed", rotary_text="first call",
        hands_down=False,
    )] if Flux3Transformer2DModel else []),
)  # fmt: skip


def plan_of(model: ModelMixin) -> Plan:
    """The plan of a model, or a refusal (ValueError) of one that is not known, or whose forward is another."""
    name = type(model).__name__
    found = next((plan for plan in PLANS if isinstance(model, plan.kind)), None)
    if found is None:
        raise ValueError(
            f"{name} cannot be made context parallel: it is not known where its tokens are made, attended and put "
            "together; docs/models.md has the models of which it is"
        )
    # A class that fully_shard makes of a known one has its forward.
    if type(model).forward is not found.kind.forward:
        raise ValueError(f"{name} cannot be made context parallel: its forward is not that of {found.kind.__name__}")
    return found
