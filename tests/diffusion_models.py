"""What models of diffusers do on a mesh: run on ranks beside one process; :mod:`tests.models` writes it down.

A model is a row: tiny, random, made of its config. A cell is a mesh of four ranks, with a number of tokens that ranks
divide or not: loss and every parameter's gradient are those of one process, or the model is refused, on every rank.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import MESHES, RANKS, Outcome, add_up, errors_of, gradients, verdict
from wallfacer_dt import context_mesh
from wallfacer_dt.testing import RankPool, worst_error

Key = tuple[str, bool]  # mesh, and whether ranks divide the tokens
Outcomes = dict[Key, Outcome]
KEYS: list[Key] = [(mesh, even) for mesh in MESHES for even in (True, False)]
TEXT = 7  # tokens, which ranks do not divide
HEADS = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2}
Draw = Callable[..., Tensor]
Inputs = Callable[[Draw, bool], dict[str, Any]]
# Of latents, by whether four ranks divide their patches of 2 x 2.
SQUARE = {True: (12, 12), False: (10, 10)}
OBLONG = {True: (8, 12), False: (6, 10)}


@dataclass(frozen=True)
class Model:
    """A model of diffusers.

    Attributes:
        kind: name of its class.
        config: its config.
        inputs: what it is called with, of what draws random numbers, and whether ranks divide the tokens.
        has: what its attention sees, or it has.
        labels: whether labels are dropped at random, as DiT does in training unless it is told otherwise.
    """

    kind: str
    config: dict[str, Any]
    inputs: Inputs
    has: str = ""
    labels: bool = field(default=False, kw_only=True)

    def made(self) -> nn.Module:
        """The model, with the same random parameters everywhere, of which some are large enough for errors to show."""
        import diffusers

        torch.manual_seed(0)
        model = getattr(diffusers, self.kind)(**self.config).double().train()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if any(what in name for what in ("to_q.w", "add_q_proj.w", "norm_q.w", "norm_added_q.w")):
                    p.mul_(4)
                if p.ndim > 1 and not p.any():  # else nothing of what comes before it would show
                    p.normal_(std=0.2)
        if getattr(model, "learnable_pos_embed", None) is not None:
            model.learnable_pos_embed.float()  # Cosmos adds no float64 ones
        if not self.labels:
            for module in model.modules():
                if hasattr(module, "dropout_prob"):
                    module.dropout_prob = 0.0
        return model

    def called_with(self, even: bool) -> dict[str, Any]:
        """Inputs of two images, the same on all ranks."""
        generator = torch.Generator().manual_seed(1)
        return self.inputs(lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64), even)


def dit(draw: Draw, even: bool) -> dict[str, Any]:
    return {"hidden_states": draw(2, 4, *SQUARE[even]), "timestep": torch.tensor([3, 700]),
            "class_labels": torch.tensor([1, 9])}  # fmt: skip


def pixart(draw: Draw, even: bool) -> dict[str, Any]:
    mask = torch.ones(2, TEXT)
    mask[0, 4:] = 0
    return {"hidden_states": draw(2, 4, *OBLONG[even]), "encoder_hidden_states": draw(2, TEXT, 24),
            "timestep": torch.tensor([3, 700]), "encoder_attention_mask": mask}  # fmt: skip


def sd3(draw: Draw, even: bool) -> dict[str, Any]:
    return {"hidden_states": draw(2, 4, *OBLONG[even]), "encoder_hidden_states": draw(2, TEXT, 24),
            "pooled_projections": draw(2, 16), "timestep": torch.tensor([3, 700])}  # fmt: skip


def flux(draw: Draw, even: bool) -> dict[str, Any]:
    height, width = (n // 2 for n in OBLONG[even])
    places = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"), -1).view(-1, 2)
    return {"hidden_states": draw(2, height * width, 8), "encoder_hidden_states": draw(2, TEXT, 24),
            "pooled_projections": draw(2, 16), "timestep": torch.tensor([0.003, 0.7]).double(),
            "img_ids": F.pad(places, (1, 0)).double(), "txt_ids": torch.zeros(TEXT, 3).double(),
            "guidance": torch.tensor([3.5, 1.0]).double()}  # fmt: skip


def flux2(draw: Draw, even: bool) -> dict[str, Any]:
    given = flux(draw, even)
    ids = {name: F.pad(given[name], (0, 1)) for name in ("img_ids", "txt_ids")}
    ids["txt_ids"][:, 3] = torch.arange(TEXT)
    return {name: x for name, x in given.items() if name != "pooled_projections"} | ids


def flux_with_residuals(draw: Draw, even: bool) -> dict[str, Any]:
    given = flux(draw, even)
    return {**given, "controlnet_block_samples": [draw(2, given["hidden_states"].shape[1], 32)]}


def wan(draw: Draw, even: bool) -> dict[str, Any]:
    return {"hidden_states": draw(2, 4, 3, *((8, 8) if even else (6, 6))), "timestep": torch.tensor([3, 700]),
            "encoder_hidden_states": draw(2, TEXT, 24)}  # fmt: skip


def wan_by_token(draw: Draw, even: bool) -> dict[str, Any]:
    given = wan(draw, even)
    tokens = 3 * (16 if even else 9)
    return {**given, "timestep": torch.arange(2 * tokens).view(2, tokens) % 997}


def wan_with_image(draw: Draw, even: bool) -> dict[str, Any]:
    # The processor takes the last 512 tokens for text.
    return {**wan(draw, even), "encoder_hidden_states": draw(2, 512, 24), "encoder_hidden_states_image": draw(2, 5, 20)}


def ltx(draw: Draw, even: bool) -> dict[str, Any]:
    side = 4 if even else 3
    mask = torch.ones(2, TEXT)
    mask[0, 4:] = 0
    return {"hidden_states": draw(2, 3 * side**2, 4), "encoder_hidden_states": draw(2, TEXT, 24),
            "timestep": torch.tensor([3, 700]), "encoder_attention_mask": mask, "num_frames": 3, "height": side,
            "width": side, "rope_interpolation_scale": (0.3, 32, 32)}  # fmt: skip


def ltx_by_token(draw: Draw, even: bool) -> dict[str, Any]:
    given = ltx(draw, even)
    tokens = given["hidden_states"].shape[1]
    return {**given, "timestep": torch.arange(2 * tokens).view(2, tokens) % 997}


def qwen(draw: Draw, even: bool) -> dict[str, Any]:
    height, width = (n // 2 for n in OBLONG[even])
    return {"hidden_states": draw(2, height * width, 8), "encoder_hidden_states": draw(2, TEXT, 24),
            "timestep": torch.tensor([0.003, 0.7]).double(), "img_shapes": [[(1, height, width)]] * 2}  # fmt: skip


def qwen_images(draw: Draw, even: bool) -> dict[str, Any]:
    given = qwen(draw, even)
    ((image, *_), *_) = given["img_shapes"]
    return {**given, "hidden_states": draw(2, 2 * given["hidden_states"].shape[1], 8), "img_shapes": [[image] * 2] * 2}


def qwen_masked(draw: Draw, even: bool) -> dict[str, Any]:
    # Samples are computed in another order, which is not its own inverse.
    mask = torch.ones(4, TEXT, dtype=torch.bool)
    mask[0, 4:] = mask[3, 4:] = False
    mask[1:3, 0] = False
    given = qwen(draw, even)
    more = {name: torch.cat([x, draw(*x.shape)]) for name, x in given.items() if isinstance(x, Tensor)}
    return {**more, "img_shapes": given["img_shapes"] * 2, "encoder_hidden_states_mask": mask}


def qwen_nothing_said(draw: Draw, even: bool) -> dict[str, Any]:
    mask = torch.tensor([[False] * TEXT, [True] * TEXT])
    return {**qwen(draw, even), "encoder_hidden_states_mask": mask}


def hunyuan(draw: Draw, even: bool) -> dict[str, Any]:
    mask = torch.ones(2, TEXT, dtype=torch.long)
    mask[1, 3:] = 0
    return {"hidden_states": draw(2, 4, 3, *((8, 8) if even else (6, 6))), "timestep": torch.tensor([3, 700]),
            "encoder_hidden_states": draw(2, TEXT, 24), "encoder_attention_mask": mask,
            "pooled_projections": draw(2, 16), "guidance": torch.tensor([3500, 1000])}  # fmt: skip


def hunyuan15(draw: Draw, even: bool) -> dict[str, Any]:
    given = hunyuan(draw, even)
    other = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 0, 1, 0]])
    return {name: given[name] for name in given if name not in ("pooled_projections", "guidance")} | {
        "encoder_hidden_states_2": draw(2, 5, 20), "encoder_attention_mask_2": other, "image_embeds": draw(2, 3, 12),
        "timestep": given["timestep"].double(),
    }  # fmt: skip


def hunyuan15_of_text(draw: Draw, even: bool) -> dict[str, Any]:
    return {**hunyuan15(draw, even), "image_embeds": torch.zeros(2, 3, 12).double()}


def cog(draw: Draw, even: bool) -> dict[str, Any]:
    return {"hidden_states": draw(2, 3, 4, *((8, 8) if even else (6, 6))), "encoder_hidden_states": draw(2, TEXT, 24),
            "timestep": torch.tensor([3, 700])}  # fmt: skip


def cog_rotary(draw: Draw, even: bool) -> dict[str, Any]:
    given = cog(draw, even)
    angles = draw(3 * (16 if even else 9), 4).repeat_interleave(2, dim=1)
    return {**given, "image_rotary_emb": (angles.cos(), angles.sin())}


def skyreels_at_a_rate(draw: Draw, even: bool) -> dict[str, Any]:
    return {**wan(draw, even), "fps": [0, 1]}


def chronoedit(draw: Draw, even: bool) -> dict[str, Any]:
    # Two frames have places of their own.
    return {**wan(draw, even), "hidden_states": draw(2, 4, 2, *((8, 8) if even else (6, 6)))}


def cosmos(draw: Draw, even: bool) -> dict[str, Any]:
    mask = torch.ones(2, TEXT, dtype=torch.bool)
    mask[0, 4:] = False
    given = wan(draw, even)
    return {**given, "condition_mask": draw(2, 1, *given["hidden_states"].shape[2:]), "attention_mask": mask,
            "fps": 16}  # fmt: skip


def cosmos_by_frame(draw: Draw, even: bool) -> dict[str, Any]:
    return {**cosmos(draw, even), "timestep": torch.tensor([[0, 300, 600], [10, 20, 900]]).view(2, 1, 3, 1, 1)}


def cosmos_with_image(draw: Draw, even: bool) -> dict[str, Any]:
    given = cosmos_by_frame(draw, even)
    both = given["encoder_hidden_states"], draw(2, 5, 20)
    return {n: x for n, x in given.items() if n != "attention_mask"} | {"encoder_hidden_states": both}


def consisid(draw: Draw, even: bool) -> dict[str, Any]:
    return {**cog_rotary(draw, even), "id_cond": draw(2, 20), "id_vit_hidden": [draw(2, 5, 16) for _ in range(2)]}


def vace(draw: Draw, even: bool) -> dict[str, Any]:
    given = wan(draw, even)
    return {**given, "control_hidden_states": draw(2, 6, *given["hidden_states"].shape[2:]),
            "control_hidden_states_scale": torch.tensor([0.5]).double()}  # fmt: skip


def without(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: x for name, x in given.items() if name not in names}


def chroma(draw: Draw, even: bool) -> dict[str, Any]:
    return without(flux(draw, even), "pooled_projections", "guidance")


def chroma_masked(draw: Draw, even: bool) -> dict[str, Any]:
    given = chroma(draw, even)
    return {**given, "attention_mask": torch.ones(2, TEXT + given["hidden_states"].shape[1], dtype=torch.bool)}


def longcat(draw: Draw, even: bool) -> dict[str, Any]:
    given = chroma(draw, even)
    return {**given, "txt_ids": F.pad(torch.arange(TEXT).double()[:, None], (0, 2)), "guidance": None}


def fibo(draw: Draw, even: bool) -> dict[str, Any]:
    return {**without(flux(draw, even), "pooled_projections"), "text_encoder_layers": [draw(2, TEXT, 12)] * 4}


def cogview(draw: Draw, even: bool) -> dict[str, Any]:
    return {"hidden_states": draw(2, 4, *OBLONG[even]), "encoder_hidden_states": draw(2, TEXT, 24),
            "timestep": torch.tensor([3, 700]), "original_size": torch.tensor([[16, 24], [8, 8]]),
            "target_size": torch.tensor([[16, 24], [32, 8]]),
            "crop_coords": torch.tensor([[0, 0], [2, 1]])}  # fmt: skip


def glm(draw: Draw, even: bool) -> dict[str, Any]:
    given = without(cogview(draw, even), "original_size")
    height, width = (n // 2 for n in OBLONG[even])
    prior = torch.arange(2 * height * width).view(2, -1) % 13
    return {**given, "prior_token_id": prior, "prior_token_drop": prior < torch.tensor([[3], [13]])}


def hunyuan_image(draw: Draw, even: bool) -> dict[str, Any]:
    mask = torch.ones(2, TEXT, dtype=torch.long)
    mask[1, 3:] = 0
    return {"hidden_states": draw(2, 4, *OBLONG[even]), "timestep": torch.tensor([3, 700]).double(),
            "encoder_hidden_states": draw(2, TEXT, 24), "encoder_attention_mask": mask}  # fmt: skip


def hunyuan_image_glyphs(draw: Draw, even: bool) -> dict[str, Any]:
    other = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 0, 1, 0]])
    return {**hunyuan_image(draw, even), "encoder_hidden_states_2": draw(2, 5, 20), "encoder_attention_mask_2": other,
            "timestep_r": torch.tensor([1, 400]).double(), "guidance": torch.tensor([3500, 1000]).double()}  # fmt: skip


def hunyuan_image_refiner(draw: Draw, even: bool) -> dict[str, Any]:
    return {**hunyuan_image(draw, even), "hidden_states": draw(2, 4, 3, *((8, 8) if even else (6, 6)))}


def hunyuan_dit(draw: Draw, even: bool) -> dict[str, Any]:
    height, width = (n // 2 for n in OBLONG[even])
    angles = draw(height * width, 4).repeat_interleave(2, dim=1)
    mask = torch.ones(2, TEXT)
    mask[0, 4:] = 0
    return {"hidden_states": draw(2, 4, *OBLONG[even]), "timestep": torch.tensor([3, 700]).double(),
            "encoder_hidden_states": draw(2, TEXT, 24), "text_embedding_mask": mask,
            "encoder_hidden_states_t5": draw(2, 5, 16), "text_embedding_mask_t5": torch.tensor([[1, 1, 1, 0, 0]] * 2),
            "image_meta_size": torch.arange(12).view(2, 6), "style": torch.zeros(2, dtype=torch.long),
            "image_rotary_emb": (angles.cos(), angles.sin())}  # fmt: skip


def hunyuan_dit_no_rotary(draw: Draw, even: bool) -> dict[str, Any]:
    return {**hunyuan_dit(draw, even), "image_rotary_emb": None}


def krea(draw: Draw, even: bool) -> dict[str, Any]:
    given = flux(draw, even)
    return {"hidden_states": given["hidden_states"], "encoder_hidden_states": draw(2, TEXT, 3, 24),
            "timestep": given["timestep"], "position_ids": torch.cat([given["txt_ids"], given["img_ids"]])}  # fmt: skip


def krea_masked(draw: Draw, even: bool) -> dict[str, Any]:
    mask = torch.ones(2, TEXT, dtype=torch.bool)
    mask[0, 4:] = False
    return {**krea(draw, even), "encoder_attention_mask": mask}


def aura(draw: Draw, even: bool) -> dict[str, Any]:
    return without(sd3(draw, even), "pooled_projections") | {"timestep": torch.tensor([0.003, 0.7]).double()}


def prx(draw: Draw, even: bool) -> dict[str, Any]:
    return without(sd3(draw, even), "pooled_projections") | {"timestep": torch.tensor([0.003, 0.7]).double()}


def prx_masked(draw: Draw, even: bool) -> dict[str, Any]:
    return {**prx(draw, even), "attention_mask": krea_masked(draw, even)["encoder_attention_mask"]}


def ernie(draw: Draw, even: bool) -> dict[str, Any]:
    return {"hidden_states": draw(2, 4, *OBLONG[even]), "timestep": torch.tensor([3, 700]),
            "text_bth": draw(2, TEXT, 24), "text_lens": torch.tensor([TEXT, TEXT])}  # fmt: skip


def ernie_masked(draw: Draw, even: bool) -> dict[str, Any]:
    return {**ernie(draw, even), "text_lens": torch.tensor([4, TEXT])}


def joy(draw: Draw, even: bool) -> dict[str, Any]:
    side = 8 if even else 6
    return {"hidden_states": draw(2, 3, 4, 1, side, side), "timestep": torch.tensor([3, 700]),
            "encoder_hidden_states": draw(2, TEXT, 24)}  # fmt: skip


def lumina(draw: Draw, even: bool) -> dict[str, Any]:
    given = cogview(draw, even)
    mask = (torch.arange(TEXT) < 4).long()  # with which ranks divide text and image where they do the image
    return {**{name: given[name] for name in ("hidden_states", "encoder_hidden_states")},
            "timestep": torch.tensor([0.3, 0.7]).double(), "encoder_attention_mask": mask.expand(2, -1)}  # fmt: skip


def lumina_masked(draw: Draw, even: bool) -> dict[str, Any]:
    mask = (torch.arange(TEXT) < torch.tensor([[3], [5]])).long()
    return {**lumina(draw, even), "encoder_attention_mask": mask}


def z_image(draw: Draw, even: bool) -> dict[str, Any]:
    height, width = OBLONG[even]
    return {"x": [*draw(2, 4, 1, height, width)], "t": torch.tensor([0.3, 0.7]).double(),
            "cap_feats": [draw(TEXT, 24), draw(TEXT + 2, 24)]}  # fmt: skip


def z_image_masked(draw: Draw, even: bool) -> dict[str, Any]:
    return {**z_image(draw, even), "cap_feats": [draw(TEXT, 24), draw(40, 24)]}


def flux3(draw: Draw, even: bool) -> dict[str, Any]:
    return without(flux2(draw, even), "guidance")


def flux3_map(draw: Draw, even: bool) -> dict[str, Any]:
    return {**flux3(draw, even), "target_timestep": torch.tensor([0.001, 0.3]).double()}


def flux3_edits(draw: Draw, even: bool) -> dict[str, Any]:
    given = flux3(draw, even)
    return {**given, "image_cond_hidden_states": given["hidden_states"], "image_cond_ids": given["img_ids"]}


DIT = HEADS | {"sample_size": 12, "num_embeds_ada_norm": 10}
PIXART = HEADS | {"sample_size": 12, "cross_attention_dim": 32, "caption_channels": 24, "interpolation_scale": 1}
SD3 = HEADS | {
    "sample_size": 16, "in_channels": 4, "out_channels": 4, "pos_embed_max_size": 16, "joint_attention_dim": 24,
    "caption_projection_dim": 32, "pooled_projection_dim": 16,
}  # fmt: skip
FLUX = HEADS | {
    "in_channels": 8, "num_single_layers": 2, "joint_attention_dim": 24, "pooled_projection_dim": 16,
    "axes_dims_rope": (2, 2, 4), "guidance_embeds": True,
}  # fmt: skip
WAN = HEADS | {
    "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 24, "freq_dim": 16, "ffn_dim": 48,
    "rope_max_seq_len": 32,
}  # fmt: skip
LTX = HEADS | {"in_channels": 4, "out_channels": 4, "cross_attention_dim": 32, "caption_channels": 24}
FLUX2 = HEADS | {
    "in_channels": 8, "num_single_layers": 2, "joint_attention_dim": 24, "axes_dims_rope": (2, 2, 2, 2),
    "timestep_guidance_channels": 16,
}  # fmt: skip
QWEN = HEADS | {"in_channels": 8, "out_channels": 2, "joint_attention_dim": 24, "axes_dims_rope": (2, 2, 4)}
HUNYUAN = HEADS | {
    "in_channels": 4, "out_channels": 4, "num_single_layers": 2, "num_refiner_layers": 1, "text_embed_dim": 24,
    "pooled_projection_dim": 16, "rope_axes_dim": (2, 2, 4),
}  # fmt: skip
HUNYUAN15 = HEADS | {
    "in_channels": 4, "out_channels": 4, "num_refiner_layers": 1, "text_embed_dim": 24, "text_embed_2_dim": 20,
    "image_embed_dim": 12, "rope_axes_dim": (2, 2, 4), "patch_size": 2,
}  # fmt: skip
COG = HEADS | {
    "in_channels": 4, "out_channels": 4, "time_embed_dim": 16, "text_embed_dim": 24, "sample_width": 8,
    "sample_height": 8, "sample_frames": 9, "max_text_seq_length": TEXT,
}  # fmt: skip
COSMOS = HEADS | {
    "in_channels": 5, "out_channels": 4, "attention_head_dim": 12, "text_embed_dim": 24, "adaln_lora_dim": 16,
    "max_size": (4, 8, 8), "concat_padding_mask": False,
}  # fmt: skip
CONSISID = COG | {"use_rotary_positional_embeddings": True}
FACES = CONSISID | {
    "is_train_face": True, "cross_attn_interval": 1, "cross_attn_dim_head": 8, "cross_attn_num_heads": 2,
    "LFE_id_dim": 20, "LFE_vit_dim": 16, "LFE_depth": 2, "LFE_dim_head": 8, "LFE_num_heads": 2, "LFE_num_id_token": 2,
    "LFE_num_querie": 3, "LFE_output_dim": 21, "LFE_ff_mult": 2, "LFE_num_scale": 2,
}  # fmt: skip
AURA = {
    "sample_size": 8, "num_mmdit_layers": 1, "num_single_dit_layers": 1, "attention_head_dim": 8,
    "num_attention_heads": 4, "joint_attention_dim": 24, "caption_projection_dim": 32, "pos_embed_max_size": 64,
}  # fmt: skip
FLUX_LIKE = HEADS | {
    "in_channels": 8, "num_single_layers": 2, "joint_attention_dim": 24, "axes_dims_rope": (2, 2, 4),
}  # fmt: skip
CHROMA = FLUX_LIKE | {"approximator_num_channels": 16, "approximator_hidden_dim": 24, "approximator_layers": 1}
FIBO = FLUX_LIKE | {"text_encoder_dim": 12, "guidance_embeds": True}
COGVIEW = HEADS | {
    "in_channels": 4, "out_channels": 4, "text_embed_dim": 24, "time_embed_dim": 16, "condition_dim": 8,
}  # fmt: skip
GLM = COGVIEW | {"prior_vq_quantizer_codebook_size": 13}
HUNYUAN_IMAGE = HEADS | {
    "in_channels": 4, "out_channels": 4, "num_single_layers": 2, "num_refiner_layers": 1, "patch_size": (2, 2),
    "text_embed_dim": 24, "rope_axes_dim": (4, 4),
}  # fmt: skip
GLYPHS = HUNYUAN_IMAGE | {"text_embed_2_dim": 20, "guidance_embeds": True, "use_meanflow": True}
REFINER = HUNYUAN_IMAGE | {"patch_size": (1, 2, 2), "rope_axes_dim": (2, 2, 4)}
HUNYUAN_DIT = HEADS | {
    "num_layers": 4, "in_channels": 4, "patch_size": 2, "sample_size": 8, "hidden_size": 32, "cross_attention_dim": 24,
    "cross_attention_dim_t5": 16, "pooled_projection_dim": 16, "text_len": TEXT, "text_len_t5": 5,
}  # fmt: skip
KREA = HEADS | {
    "in_channels": 8, "num_key_value_heads": 2, "intermediate_size": 48, "timestep_embed_dim": 16,
    "text_hidden_dim": 24, "num_text_layers": 3, "text_num_attention_heads": 4, "text_num_key_value_heads": 2,
    "text_intermediate_size": 32, "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1,
    "axes_dims_rope": (2, 2, 4),
}  # fmt: skip
COGVIEW3 = COGVIEW | {"pos_embed_max_size": 8, "sample_size": 12}
PRX = {
    "in_channels": 4, "context_in_dim": 24, "hidden_size": 32, "num_heads": 4, "depth": 2, "axes_dim": [4, 4],
}  # fmt: skip
NUCLEUS = HEADS | {
    "in_channels": 8, "out_channels": 2, "joint_attention_dim": 24, "axes_dims_rope": (2, 2, 4), "num_experts": 2,
    "moe_intermediate_dim": 16, "dense_moe_strategy": "all_moe",
    "capacity_factors": 1.0,
}  # fmt: skip
ERNIE = {
    "hidden_size": 32, "num_attention_heads": 4, "num_layers": 2, "ffn_hidden_size": 48, "in_channels": 4,
    "out_channels": 4, "patch_size": 2, "text_in_dim": 24, "rope_axes_dim": (2, 2, 4),
}  # fmt: skip
JOY = {
    "in_channels": 4, "hidden_size": 32, "num_attention_heads": 4, "text_dim": 24, "num_layers": 2,
    "rope_dim_list": [2, 2, 4],
}  # fmt: skip
LUMINA = {
    "sample_size": 8, "in_channels": 4, "hidden_size": 32, "num_layers": 2, "num_refiner_layers": 1,
    "num_attention_heads": 4, "num_kv_heads": 2, "multiple_of": 16, "axes_dim_rope": (2, 2, 4),
    "axes_lens": (32, 16, 16), "cap_feat_dim": 24,
}  # fmt: skip
Z_IMAGE = {
    "in_channels": 4, "dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 4, "n_kv_heads": 4,
    "cap_feat_dim": 24, "axes_dims": [2, 2, 4], "axes_lens": [128, 16, 16],
}  # fmt: skip
FLUX3 = HEADS | {
    "in_channels": 8, "cond_in_channels": 8, "num_single_layers": 2, "joint_attention_dim": 24, "timestep_channels": 16,
    "axes_dims_rope": (2, 2, 2, 2),
}  # fmt: skip
MODELS: dict[str, Model] = {
    "DiT": Model("DiTTransformer2DModel", DIT, dit),
    "DiT, labels dropped": Model("DiTTransformer2DModel", DIT, dit, labels=True),
    "PixArt": Model("PixArtTransformer2DModel", PIXART, pixart, "cross attention, masked"),
    "PixArt, dropout": Model("PixArtTransformer2DModel", PIXART | {"dropout": 0.1}, pixart, "cross attention"),
    "SD3": Model("SD3Transformer2DModel", SD3, sd3, "joint attention"),
    "SD3.5": Model(
        "SD3Transformer2DModel", SD3 | {"qk_norm": "rms_norm", "dual_attention_layers": (0,)}, sd3,
        "joint and dual attention",
    ),
    "Flux": Model("FluxTransformer2DModel", FLUX, flux, "joint attention, rotary tables"),
    "Flux, with a ControlNet": Model("FluxTransformer2DModel", FLUX, flux_with_residuals),
    "Flux 2": Model("Flux2Transformer2DModel", FLUX2, flux2, "joint attention, rotary tables"),
    "Wan 2.1": Model("WanTransformer3DModel", WAN, wan, "video, cross attention, rotary tables"),
    "Wan 2.1, from an image": Model(
        "WanTransformer3DModel", WAN | {"image_dim": 20, "added_kv_proj_dim": 48}, wan_with_image,
        "two cross attentions",
    ),
    "Wan 2.2": Model("WanTransformer3DModel", WAN, wan_by_token, "a timestep for every token"),
    "Wan 2.1, VACE": Model(
        "WanVACETransformer3DModel", WAN | {"vace_layers": [0], "vace_in_channels": 6}, vace, "two streams",
    ),
    "LTX-Video": Model("LTXVideoTransformer3DModel", LTX, ltx, "video, cross attention, masked, rotary tables"),
    "LTX-Video, from an image": Model("LTXVideoTransformer3DModel", LTX, ltx_by_token, "a timestep for every token"),
    "Qwen-Image": Model("QwenImageTransformer2DModel", QWEN, qwen, "joint attention, rotary tables"),
    "Qwen-Image, edits": Model(
        "QwenImageTransformer2DModel", QWEN | {"use_layer3d_rope": True}, qwen_images, "two images",
    ),
    "Qwen-Image, texts of two lengths": Model(
        "QwenImageTransformer2DModel", QWEN, qwen_masked, "joint attention, masked",
    ),
    "Qwen-Image, a text of no length": Model(
        "QwenImageTransformer2DModel", QWEN, qwen_nothing_said, "joint attention, masked",
    ),
    "Qwen-Image, zero_cond_t": Model(
        "QwenImageTransformer2DModel", QWEN | {"zero_cond_t": True}, qwen_images, "two images",
    ),
    "HunyuanVideo": Model(
        "HunyuanVideoTransformer3DModel", HUNYUAN, hunyuan, "video, joint attention, masked, rotary tables",
    ),
    "HunyuanVideo, from an image": Model(
        "HunyuanVideoTransformer3DModel", HUNYUAN | {"image_condition_type": "token_replace"}, hunyuan,
        "a timestep for the first frame",
    ),
    "HunyuanVideo 1.5": Model(
        "HunyuanVideo15Transformer3DModel", HUNYUAN15, hunyuan15_of_text,
        "video, joint attention, masked, rotary tables",
    ),
    "HunyuanVideo 1.5, from an image": Model(
        "HunyuanVideo15Transformer3DModel", HUNYUAN15, hunyuan15,
        "video, joint attention, masked, rotary tables",
    ),
    "CogVideoX": Model("CogVideoXTransformer3DModel", COG, cog, "video, joint attention"),
    "CogVideoX, rotary": Model(
        "CogVideoXTransformer3DModel", COG | {"use_rotary_positional_embeddings": True}, cog_rotary,
        "video, joint attention, rotary tables",
    ),
    "Chroma": Model("ChromaTransformer2DModel", CHROMA, chroma, "joint attention, rotary tables"),
    "Chroma, masked": Model("ChromaTransformer2DModel", CHROMA, chroma_masked),
    "LongCat-Image": Model("LongCatImageTransformer2DModel", FLUX_LIKE, longcat, "joint attention, rotary tables"),
    "Ovis-Image": Model("OvisImageTransformer2DModel", FLUX_LIKE, chroma, "joint attention, rotary tables"),
    "Bria 3.2": Model("BriaTransformer2DModel", FLUX_LIKE, chroma, "joint attention, rotary tables"),
    "Bria FIBO": Model(
        "BriaFiboTransformer2DModel", FIBO, fibo, "joint attention, rotary tables, text of every layer",
    ),
    "CogView4": Model(
        "CogView4Transformer2DModel", COGVIEW | {"rope_axes_dim": (6, 6)}, cogview, "joint attention, rotary tables",
    ),
    "GLM-Image": Model("GlmImageTransformer2DModel", GLM, glm, "joint attention, rotary tables, prior tokens"),
    "HunyuanImage 2.1": Model(
        "HunyuanImageTransformer2DModel", GLYPHS, hunyuan_image_glyphs, "joint attention, masked, rotary tables",
    ),
    "HunyuanImage 2.1, refiner": Model(
        "HunyuanImageTransformer2DModel", REFINER, hunyuan_image_refiner, "joint attention, masked, rotary tables",
    ),
    "HunyuanDiT": Model("HunyuanDiT2DModel", HUNYUAN_DIT, hunyuan_dit, "cross attention, rotary tables, skips"),
    "HunyuanDiT, no rotary tables": Model("HunyuanDiT2DModel", HUNYUAN_DIT, hunyuan_dit_no_rotary),
    "Krea 2": Model("Krea2Transformer2DModel", KREA, krea, "joint attention, rotary tables"),
    "Krea 2, texts of two lengths": Model(
        "Krea2Transformer2DModel", KREA, krea_masked, "joint attention, masked, rotary tables",
    ),
    "CogView3-Plus": Model("CogView3PlusTransformer2DModel", COGVIEW3, cogview, "joint attention"),
    "ChronoEdit": Model("ChronoEditTransformer3DModel", WAN, chronoedit, "two frames far apart"),
    "ChronoEdit, from an image": Model(
        "ChronoEditTransformer3DModel", WAN | {"image_dim": 20, "added_kv_proj_dim": 48}, wan_with_image,
        "two cross attentions",
    ),
    "SkyReels V2": Model("SkyReelsV2Transformer3DModel", WAN, wan, "video, cross attention, rotary tables"),
    "SkyReels V2, from an image": Model(
        "SkyReelsV2Transformer3DModel", WAN | {"image_dim": 20, "added_kv_proj_dim": 48}, wan_with_image,
        "two cross attentions",
    ),
    "SkyReels V2, at a rate": Model(
        "SkyReelsV2Transformer3DModel", WAN | {"inject_sample_info": True}, skyreels_at_a_rate, "frames per second",
    ),
    "SkyReels V2, causal": Model(
        "SkyReelsV2Transformer3DModel", WAN | {"num_frame_per_block": 3}, wan, "a causal mask of frames",
    ),
    "Cosmos": Model(
        "CosmosTransformer3DModel", COSMOS, cosmos, "video, cross attention, masked, rotary tables, learned places",
    ),
    "Cosmos 2, by frame": Model(
        "CosmosTransformer3DModel", COSMOS | {"extra_pos_embed_type": None}, cosmos_by_frame,
        "a timestep for every frame",
    ),
    "Cosmos 2.5, with an image": Model(
        "CosmosTransformer3DModel",
        COSMOS | {"img_context_dim_in": 20, "img_context_dim_out": 48, "use_crossattn_projection": True,
                  "crossattn_proj_in_channels": 24, "encoder_hidden_states_channels": 24},
        cosmos_with_image, "two cross attentions, a timestep for every frame",
    ),
    "ConsisID": Model("ConsisIDTransformer3DModel", CONSISID, cog_rotary, "video, joint attention, rotary tables"),
    "ConsisID, faces": Model(
        "ConsisIDTransformer3DModel", FACES, consisid, "joint attention, cross attention between blocks",
    ),
    "AuraFlow": Model("AuraFlowTransformer2DModel", AURA, aura, "joint attention"),
    "PRX": Model("PRXTransformer2DModel", PRX, prx, "text of keys alone, rotary tables"),
    "PRX, texts of two lengths": Model(
        "PRXTransformer2DModel", PRX | {"bottleneck_size": 8, "resolution_embeds": True}, prx_masked,
        "text of keys alone, masked, rotary tables",
    ),
    "Ernie-Image": Model("ErnieImageTransformer2DModel", ERNIE, ernie, "joint attention, rotary tables"),
    "Ernie-Image, texts of two lengths": Model(
        "ErnieImageTransformer2DModel", ERNIE, ernie_masked, "joint attention, masked, rotary tables",
    ),
    "JoyImage-Edit": Model(
        "JoyImageEditTransformer3DModel", JOY, joy, "joint attention, rotary tables, several images",
    ),
    "JoyImage-Edit, mrope": Model(
        "JoyImageEditTransformer3DModel", JOY | {"rope_type": "mrope"}, joy,
        "joint attention, rotary tables, several images",
    ),
    "Lumina 2": Model("Lumina2Transformer2DModel", LUMINA, lumina, "text and image in one sequence, rotary tables"),
    "Lumina 2, texts of two lengths": Model("Lumina2Transformer2DModel", LUMINA, lumina_masked),
    "Z-Image": Model("ZImageTransformer2DModel", Z_IMAGE, z_image, "text and image in one sequence, rotary tables"),
    "Z-Image, texts of two lengths": Model("ZImageTransformer2DModel", Z_IMAGE, z_image_masked),
    "Flux 3": Model("Flux3Transformer2DModel", FLUX3, flux3, "joint attention, rotary tables"),
    "Flux 3, flow map": Model(
        "Flux3Transformer2DModel", FLUX3 | {"flow_map": True}, flux3_map, "joint attention, rotary tables",
    ),
    "Flux 3, edits": Model("Flux3Transformer2DModel", FLUX3, flux3_edits),
    "NucleusMoE-Image": Model("NucleusMoEImageTransformer2DModel", NUCLEUS, qwen),
}  # fmt: skip


def loss_of(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """That of all of the output, against something random."""
    found = model(**inputs, return_dict=False)[0]
    if isinstance(found, list):
        found = torch.stack(found)
    generator = torch.Generator().manual_seed(2)
    wanted = torch.randn(found.shape, generator=generator, dtype=torch.float64).to(found.dtype)
    return F.mse_loss(found, wanted)  # no comparison: a loss


def try_model(name: str, keys: list[Key]) -> Outcomes:
    """On every rank: a model on meshes, beside one process."""
    from wallfacer_dt.integrations.diffusers import context_parallel

    kind = MODELS[name]
    model = kind.made()
    outcomes: Outcomes = {}
    expected: dict[bool, tuple[Tensor, dict[str, Tensor]]] = {}
    for mesh_name, even in keys:
        mesh = context_mesh("cpu", **MESHES[mesh_name])
        inputs = kind.called_with(even)
        try:
            handle = context_parallel(model, mesh)
            if even not in expected:
                with handle.whole():
                    loss = loss_of(model, inputs)
                    loss.backward()
                expected[even] = loss.detach(), gradients(model)
            outcomes[mesh_name, even] = compared(model, inputs, *expected[even])
        except (ValueError, TypeError, NotImplementedError) as error:
            outcomes[mesh_name, even] = Outcome(refused=f"{error}")
            model.zero_grad()
    return outcomes


def averaged(model: nn.Module) -> dict[str, Tensor]:
    """Gradients, averaged over ranks; and the model's are gone."""
    grads = gradients(model)
    add_up(grads.values())
    return {name: grad / dist.get_world_size() for name, grad in grads.items()}


def compared(model: nn.Module, inputs: dict[str, Any], loss: Tensor, expected: dict[str, Tensor]) -> Outcome:
    """Beside one process. The loss is the same on every rank, to the last bit, since outputs are put together."""
    found = loss_of(model, inputs)
    found.backward()
    errors = errors_of(averaged(model), expected)
    worst = max(errors, key=lambda name: errors[name])
    return Outcome(worst_error([(found.detach()[None], loss[None])], relative_to="each"), errors[worst], worst)


def try_all(pool: RankPool, names: Iterable[str], keys: Callable[[str], list[Key]]) -> Iterator[tuple[str, Outcomes]]:
    """What models give on meshes. What one rank refuses, all have refused."""
    for name in names:
        told = pool.run(try_model, name, keys(name))
        for key in keys(name):
            assert len({bool(its[key].refused) for its in told}) == 1, [its[key] for its in told]
        yield name, told[0]


def section(outcomes: dict[str, Outcomes]) -> str:
    """That of docs/models.md."""
    import diffusers

    notes: list[str] = []

    def noted(text: str) -> int:
        if text not in notes:
            notes.append(text)
        return notes.index(text) + 1

    lines = []
    for name, tried in outcomes.items():
        told = [verdict(tried[key]) for key in KEYS]
        cells = [what if what in ("equal", "WRONG") else f"refused ({noted(what)})" for what in told]
        own = "none" if getattr(diffusers, MODELS[name].kind)._cp_plan is None else "yes"
        lines.append(f"| {' | '.join([name, MODELS[name].has, *cells, own])} |")
    columns = [f"{mesh}{'' if even else ', uneven'}" for mesh, even in KEYS]
    head = f"| {' | '.join(['model', 'has', *columns, '`_cp_plan`'])} |\n|{' --- |' * (len(KEYS) + 3)}"
    said = "\n".join(f"{n}. `{text}`" for n, text in enumerate(notes, 1))
    return SECTION.format(version=diffusers.__version__, head=head, lines="\n".join(lines), notes=said)


SECTION = """
# Models of diffusers

Generated by `python -m tests.diffusion_models`, with diffusers {version}; `tests/test_diffusers.py` fails when it is
out of date. As with transformers, but for this: models are called with whole latents on every rank, and give whole
outputs; the loss is a mean over all of the output, and gradients are averaged over ranks. **uneven**: a number of
tokens that four ranks do not divide; nor do they that of the text, ever. Rotary tables, and norms of Wan, are applied
in float32. The last column says whether diffusers has a plan of its own, for its context parallelism.

{head}
{lines}

{notes}
"""


if __name__ == "__main__":
    ranks = RankPool(RANKS, timeout=300)
    print(section(dict(try_all(ranks, MODELS, lambda _: KEYS))), end="")
    ranks.close()
