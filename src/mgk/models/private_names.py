"""Names of torch and transformers without a promise to stay that mgk.nn and mgk.models override, and why.

``tests/models/test_private_names.py`` fails when one of them moves, and when one that is not listed is overridden.
"""

PRIVATE_NAMES: dict[str, str] = {
    "torch.nn.Module._apply": "keeps the M-step's buffers in float32; Module.to and .half have no public hook",
    "transformers.PreTrainedModel._init_weights": "the documented way to initialise a model; init_weights calls it",
    "transformers.PreTrainedModel.is_custom_code": (
        "as custom code, modules without parameters of their own are never initialised: attention would start with the"
        " projections of nn.Linear. Overriding initialize_weights instead needs transformers' guards of torch.nn.init"
    ),
    "transformers.PreTrainedModel._no_split_modules": "the documented way to name the layers of a device_map",
    "transformers.PreTrainedModel._skip_keys_device_placement": "caches are moved by their layers, not by accelerate",
    "transformers.PreTrainedModel._keep_in_fp32_modules_strict": (
        "buffers of the M-step in float32 when loading in half precision; from_pretrained's dtype has no exceptions"
    ),
    "transformers.PreTrainedModel._tied_weights_keys": "the documented way to tie weights; tie_weights reads it",
    "transformers.PreTrainedModel._is_stateful": (
        "refuses assisted decoding of a linear state; without it the first rejected token raises, in mid-generation"
    ),
    "transformers.GenerationMixin._validate_generated_length": (
        "the only place before decoding that knows the final max_length; generate() resolves it after its arguments"
    ),
}

# The start of the warning about missing weights, and its logger: an error replaces it. transformers' set_verbosity
# would hide every other warning of loading too.
LOAD_REPORT = ("transformers.modeling_utils", "LOAD REPORT")
