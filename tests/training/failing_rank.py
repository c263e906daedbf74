"""Run by torchrun: the command ``mgk``, whose last rank alone fails in the middle of a step."""

import os
from typing import Any

from mgk.cli import main
from mgk.training.errors import TrainingError
from mgk.training.trainer import MgkTrainer


class Failing(MgkTrainer):
    """Fails on one rank, before the gradients that the others wait for."""

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        if self.state.global_step == 3 and os.environ["RANK"] == "1":
            raise TrainingError("the last rank has failed")
        return super().compute_loss(*arguments, **options)


if __name__ == "__main__":
    import mgk.training.run

    mgk.training.run.MgkTrainer = Failing
    main()
