"""Wrong: asked for whole parameters, it gives this rank's rows."""

from minimal import *  # noqa: F403


def fsdp_gather_full_params(fsdp_model):
    return dict(fsdp_model.module.named_parameters())
