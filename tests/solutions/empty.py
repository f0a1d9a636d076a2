"""The handout's template: nothing is implemented, and nothing may be earned."""


def get_flashattention_autograd_function_pytorch():
    raise NotImplementedError


def get_flashattention_autograd_function_triton():
    raise NotImplementedError


def get_ddp(module):
    raise NotImplementedError


def ddp_on_after_backward(ddp_model, optimizer):
    raise NotImplementedError


def get_ddp_individual_parameters(module):
    raise NotImplementedError


def ddp_individual_parameters_on_after_backward(ddp_model, optimizer):
    raise NotImplementedError


def get_ddp_bucketed(module, bucket_size_mb):
    raise NotImplementedError


def ddp_bucketed_on_after_backward(ddp_model, optimizer):
    raise NotImplementedError


def ddp_bucketed_on_train_batch_start(ddp_model, optimizer):
    raise NotImplementedError


def get_fsdp(module, compute_dtype=None):
    raise NotImplementedError


def fsdp_on_after_backward(fsdp_model, optimizer):
    raise NotImplementedError


def fsdp_gather_full_params(fsdp_model):
    raise NotImplementedError


def get_sharded_optimizer(params, optimizer_cls, **kwargs):
    raise NotImplementedError
