"""Wrong: the log-sum-exp is saved in base 2; output and gradients are right."""

import math

import minimal
from minimal import *  # noqa: F403


class Scaled(minimal.FlashPyTorch):
    @staticmethod
    def forward(ctx, *args):
        output = minimal.FlashPyTorch.forward(ctx, *args)
        *tensors, lse = ctx.to_save
        ctx.save_for_backward(*tensors, lse / math.log(2))
        return output

    @staticmethod
    def backward(ctx, grad_output):
        class Natural:
            is_causal = ctx.is_causal
            saved_tensors = (*ctx.saved_tensors[:-1], ctx.saved_tensors[-1] * math.log(2))

        return minimal.backward_pass(Natural, grad_output)


def get_flashattention_autograd_function_pytorch():
    return Scaled
