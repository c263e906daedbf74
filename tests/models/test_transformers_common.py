"""transformers' own common tests of models, run on every variant as encoder and as decoder.

They are not part of this project: set ``MGK_TRANSFORMERS_CHECKOUT`` to a checkout of transformers of the installed
release (``git clone -b vX.Y.Z``; source archives lack the tests of generation) and install ``parameterized`` and
``httpx``. What differs by design is listed with its reason in docs/models.md and skipped here.
"""

import os
import sys
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import LINEAR, VARIANTS, config, tokens

from mgk.models import (
    MgkConfig,
    MgkForCausalLM,
    MgkForMaskedLM,
    MgkForQuestionAnswering,
    MgkForSequenceClassification,
    MgkForTokenClassification,
    MgkModel,
)

CHECKOUT = os.environ.get("MGK_TRANSFORMERS_CHECKOUT")
if CHECKOUT is None:
    pytest.skip("MGK_TRANSFORMERS_CHECKOUT names no checkout of transformers", allow_module_level=True)
pytest.importorskip("parameterized", reason="transformers' tests need the package parameterized")
for _file in ("tests/test_modeling_common.py", "tests/generation/test_utils.py"):
    if not (Path(CHECKOUT) / _file).exists():
        pytest.fail(f"MGK_TRANSFORMERS_CHECKOUT={CHECKOUT} has no {_file}", pytrace=False)
sys.path.insert(0, CHECKOUT)

from tests.generation.test_utils import GenerationTesterMixin  # noqa: E402
from tests.test_configuration_common import ConfigTester  # noqa: E402
from tests.test_modeling_common import ModelTesterMixin  # noqa: E402

MgkForCausalLM._can_compile_fullgraph = True  # only these tests ask
# their decorators return what the test returns
pytestmark = pytest.mark.filterwarnings("ignore:It is deprecated to return a value:DeprecationWarning")

# By-design differences, also in docs/models.md: the test's name, or the start of several, and the reason.
DIFFERENT: dict[str, str] = {
    "test_model_weights_reload_no_missing_tied_weights": "weights that are missing raise",
    "test_keep_in_fp32_modules_exist": "the buffers that stay in float32 exist with prior='em' and variance='em' only",
}
_KEYS = "cached keys have an axis of components: (B, H, M, S, D)"
_MASKS = "models take masks of tokens, (B, past + L); packed rows are marked by seq_idx or position_ids"
_WEIGHTS = "weights cannot be computed from a state of linear attention"
DIFFERENT_DECODER: dict[str, str] = {
    "test_past_key_values_format": _KEYS,
    "test_greedy_generate_dict_outputs_use_cache": _KEYS,
    "test_beam_search_generate_dict_outputs_use_cache": _KEYS,
    "test_generate_with_static_cache": _KEYS,
    "test_generate_from_inputs_embeds_with_static_cache": _KEYS,
    "test_generate_compilation_all_outputs": _KEYS,
    "test_custom_4d_attention_mask": _MASKS,
}
_STATE = "a state of linear attention holds no keys and values"
DIFFERENT_STATE: dict[str, str] = {
    "test_past_key_values_format": _STATE,
    "test_generate_with_static_cache": _STATE,
    "test_generate_from_inputs_embeds_with_static_cache": _STATE,
    "test_generate_compilation_all_outputs": _WEIGHTS,
    "test_custom_4d_attention_mask": _MASKS,
    "test_greedy_generate_dict_outputs_use_cache": _WEIGHTS,
    "test_beam_search_generate_dict_outputs_use_cache": _WEIGHTS,
}


class Tester:
    """What the common tests ask for: sizes, a configuration and inputs."""

    batch_size, seq_length, is_training = 3, 7, True
    hidden_size, num_hidden_layers, num_attention_heads = 16, 2, 2

    def __init__(self, parent: unittest.TestCase, attention: str, is_decoder: bool) -> None:
        self.parent, self.attention, self.is_decoder = parent, attention, is_decoder

    def get_config(self) -> MgkConfig:
        return config(
            self.attention, is_decoder=self.is_decoder, pad_token_id=0, bos_token_id=1, eos_token_id=2
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[MgkConfig, dict[str, torch.Tensor]]:
        ids = tokens(self.batch_size, self.seq_length).clamp_min(3)
        mask = torch.ones_like(ids)
        return self.get_config(), {"input_ids": ids, "attention_mask": mask}


class Common(ModelTesterMixin):
    """Of every model."""

    attention: str
    is_decoder = False
    test_resize_embeddings = True

    def setUp(self) -> None:
        name = self._testMethodName
        reasons = dict(DIFFERENT)
        if self.is_decoder:
            reasons |= DIFFERENT_STATE if self.attention in LINEAR else DIFFERENT_DECODER
        for start, reason in reasons.items():
            if name.startswith(start):
                self.skipTest(reason)
        if name == "test_retain_grad_hidden_states_attentions":
            self.has_attentions = (
                False  # weights are computed beside the output: no gradient flows through them
            )
        if name.startswith("test_training"):
            self.all_model_classes = [
                cls for cls in self.all_model_classes if cls is not MgkModel
            ]  # it has no loss
        self.model_tester = Tester(self, self.attention, self.is_decoder)
        self.config_tester = ConfigTester(self, config_class=MgkConfig, hidden_size=16)

    def _prepare_for_class(self, inputs_dict: Any, model_class: Any, return_labels: bool = False) -> Any:
        """With labels; theirs knows the classes of transformers only."""
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels=False)
        rows, length = self.model_tester.batch_size, self.model_tester.seq_length
        if return_labels and model_class is MgkForQuestionAnswering:
            inputs |= dict.fromkeys(("start_positions", "end_positions"), torch.zeros(rows, dtype=torch.long))
        elif return_labels and model_class is not MgkModel:
            shape = (rows,) if model_class is MgkForSequenceClassification else (rows, length)
            inputs["labels"] = torch.zeros(shape, dtype=torch.long)
        return inputs

    def test_config(self) -> None:
        self.config_tester.run_common_tests()


ENCODERS = (
    MgkModel,
    MgkForSequenceClassification,
    MgkForTokenClassification,
    MgkForMaskedLM,
    MgkForQuestionAnswering,
)
for _attention in VARIANTS:
    _encoder = {"attention": _attention, "all_model_classes": ENCODERS, "all_generative_model_classes": ()}
    _decoder = {
        "attention": _attention,
        "is_decoder": True,
        "all_model_classes": (MgkForCausalLM,),
        "all_generative_model_classes": (MgkForCausalLM,),
    }
    for _name, _bases, _body in (
        (f"TestEncoder_{_attention}", (Common, unittest.TestCase), _encoder),
        (f"TestDecoder_{_attention}", (Common, GenerationTesterMixin, unittest.TestCase), _decoder),
    ):
        globals()[_name] = type(_name, _bases, _body)
