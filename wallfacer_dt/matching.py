"""What a style of attention does where a plan's path matches modules, and where none; see Note [Noticing]."""

from typing import Any, ClassVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from wallfacer_dt.agreement.agree import refusing_together
from wallfacer_dt.dealing import notice_applied, notice_missed
from wallfacer_dt.mesh import mesh_ranks, name_of
from wallfacer_dt.unmatched import Place, matches, place_in_plan


class AttentionStyle(ParallelStyle):
    """A style without which every rank would attend its own tokens alone."""

    _kind: ClassVar[str] = "inner attention"

    def __init__(self) -> None:
        super().__init__()
        self._applied: list[Place] = []  # where this style matched, of the last plan and model

    def _notice_applied(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Note that it has been applied to a module, on a mesh that shares sequences."""
        place = place_in_plan()
        if place is not None:
            beside = [x for x in self._applied if x._replace(path=place.path) == place]
            self._applied = [*beside, place]
        notice_applied(mesh_ranks(mesh), place, module)

    def matched_nothing(self, path: str, mesh: DeviceMesh, *, is_part: bool) -> None:
        """Refuse (ValueError) a plan's path that matches no module where tokens are dealt out.

        At once if they have been, unless it ``is_part`` of a path that matches in other modules. Where nobody says of
        which path it is a part, it may match there. In layers of which there are none nothing is attended.
        """
        place = place_in_plan()
        whole, model = (path, None) if place is None else (place.path, place.model())
        if not f".{whole}".endswith(f".{path}"):  # of a plan that a style applies where another one has it
            whole, model = path, None
        found = True if model is None else matches(model, whole)
        if is_part and (found is None or place in self._applied):
            return
        of = "" if model is None else f" of {type(model).__name__}"
        with refusing_together(name_of(mesh)):
            notice_missed(
                mesh_ranks(self._sharing(mesh)),
                f"{type(self).__name__} was to be applied to {whole!r}, which matches no module{of}, so that "
                f"every rank would attend its own tokens alone: name the {self._kind} as model.named_modules() does, "
                "or leave the path out of the plan of a model, or a layer, that has none",
                place,
                at_once=not (is_part and found),
            )

    def _sharing(self, mesh: DeviceMesh) -> DeviceMesh:
        """The axes of a mesh that share sequences."""
        return mesh

    def __getstate__(self) -> dict[str, Any]:
        """Plans are of this process."""
        return vars(self) | {"_applied": []}
