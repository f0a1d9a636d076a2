"""Wrong: the forward saves the matrix of scores for the backward, which FlashAttention is there to avoid."""

import minimal
from minimal import *  # noqa: F403


class Saving(minimal.FlashPyTorch):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        output = minimal.FlashPyTorch.forward(ctx, q, k, v, is_causal)
        ctx.save_for_backward(*ctx.to_save, q @ k.transpose(-2, -1))
        return output

    @staticmethod
    def backward(ctx, grad_output):
        class First:
            is_causal = ctx.is_causal
            saved_tensors = ctx.saved_tensors[:-1]

        return minimal.backward_pass(First, grad_output)


def get_flashattention_autograd_function_pytorch():
    return Saving
