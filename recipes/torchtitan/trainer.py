"""torchtitan's Trainer; its configuration has the fields of this recipe and refuses what does not go with them."""

from dataclasses import dataclass, field

from torchtitan.trainer import Trainer

from recipes.torchtitan.check import check_config
from recipes.torchtitan.checkpointing import ActivationCheckpointing, SelectiveACSavingAttention
from recipes.torchtitan.settings import ContextParallelism
from recipes.torchtitan.text import TextLoader


class ContextTrainer(Trainer):
    """torchtitan's Trainer, as it is."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's configuration with this recipe's fields; `check_config` says what it refuses."""

        # Narrower than torchtitan's, for the command line to offer these alone.
        # pyrefly: ignore[bad-override-mutable-attribute]
        parallelism: ContextParallelism = field(default_factory=ContextParallelism)
        """torchtitan's parallelisms, and the shape of context parallelism's mesh."""

        # pyrefly: ignore[bad-override-mutable-attribute]
        activation_checkpoint: ActivationCheckpointing = field(default_factory=SelectiveACSavingAttention.Config)
        """What is computed again in the backward; attention never is."""

        # pyrefly: ignore[bad-override-mutable-attribute]
        dataloader: TextLoader.Config = field(default_factory=TextLoader.Config)
        """The text: `dataset_path` is a file, None the source of Python's standard library; `dataset` is not used."""

        def __post_init__(self) -> None:
            # Not super(): a dataclass with slots is another class than the one whose body this is.
            Trainer.Config.__post_init__(self)
            check_config(self)
