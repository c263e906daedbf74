"""The M-step in transformers' ``Trainer``."""

from typing import Any

from transformers import TrainerCallback

from mgk import nn as mgk_nn


class MStepCallback(TrainerCallback):
    """``Trainer(..., callbacks=[MStepCallback()])``: the M-step."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Update "em" priors and variances."""
        mgk_nn.m_step_all(kwargs["model"])
