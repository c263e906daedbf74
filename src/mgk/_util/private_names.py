"""Private names of torch and transformers, and why they are used."""

PRIVATE_NAMES: dict[str, str] = {
    "torch.nn.Module._apply": "Module.to has no hook: the M-step's buffers stay in float32",
    "transformers.PreTrainedModel._init_weights": "the documented way to initialise",
    # custom code never initialises modules without parameters of their own
    "transformers.PreTrainedModel.is_custom_code": "attention initialises its projections",
    "transformers.PreTrainedModel._no_split_modules": "the documented way to name layers",
    "transformers.PreTrainedModel._skip_keys_device_placement": "layers move their caches",
    "transformers.PreTrainedModel._keep_in_fp32_modules_strict": "the M-step's buffers",
    "transformers.PreTrainedModel._tied_weights_keys": "the documented way to tie weights",
    # otherwise the first rejected token raises, in mid-generation
    "transformers.PreTrainedModel._is_stateful": "no assisted decoding with a linear state",
    # generate() resolves max_length after its arguments
    "transformers.GenerationMixin._validate_generated_length": "knows the final max_length",
}

# Names that are read or set, not overridden. No public name has the same meaning.
PRIVATE_ATTRIBUTES: dict[str, str] = {
    "torch._C._are_functorch_transforms_active": "small calls go past the operators",
    "torch._C._functorch.TransformType": "a jvp within a jvp",
    "torch._C._functorch.get_interpreter_stack": "a jvp within a jvp",
    "torch._C._functorch.get_unwrapped": "the tangent below vmap",
    "torch._C._functorch.is_functorch_wrapped_tensor": "torch.func hides the numbers",
    "torch._C._functorch.is_gradtrackingtensor": "a tangent of torch.func.jvp",
    "torch._C._len_torch_dispatch_stack": "small calls go past the operators",
    "torch.autograd.forward_ad._current_level": "decoding asks at every token",
    "torch.nn.Module._forward_hooks": "a projection that is watched runs by itself",
    "torch.nn.Module._forward_pre_hooks": "a projection that is watched runs by itself",
    # torch counts SDPA on other devices only
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "FLOPs on the CPU",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": "FLOPs on the CPU",
    "torch.nn.MultiheadAttention._qkv_same_embed_dim": "nn.TransformerEncoder fuses by it",
    "transformers.PreTrainedConfig._attn_implementation": "a refused request is forgotten",
}

# The logger and the first words of the warning about missing weights, which an error
# replaces; set_verbosity would hide every other warning too.
LOAD_REPORT = ("transformers.modeling_utils", "LOAD REPORT")
