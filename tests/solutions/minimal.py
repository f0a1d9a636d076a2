"""A short solution of every graded problem, written from the handout: no import of this
repository's package.

It serves what the handout asks and no more: tiles divide the lengths, layers run in their order.
"""

import math

import torch
import torch.distributed as dist
from torch import nn

TILE = 16


# FlashAttention-2


def backward_pass(ctx, grad_output):
    """The recomputed backward of both classes."""
    q, k, v, output, lse = ctx.saved_tensors
    scale = q.shape[-1] ** -0.5
    scores = q @ k.transpose(-2, -1) * scale
    if ctx.is_causal:
        scores = scores.masked_fill(hidden(0, q.shape[-2], 0, k.shape[-2], q.device), -1e6)
    p = torch.exp(scores - lse[..., None])
    delta = (output * grad_output).sum(-1, keepdim=True)
    ds = p * (grad_output @ v.transpose(-2, -1) - delta)
    return ds @ k * scale, ds.transpose(-2, -1) @ q * scale, p.transpose(-2, -1) @ grad_output, None


def hidden(first_query, last_query, first_key, last_key, device=None):
    queries = torch.arange(first_query, last_query, device=device)
    return queries[:, None] < torch.arange(first_key, last_key, device=device)[None, :]


class FlashPyTorch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        scale = q.shape[-1] ** -0.5
        output, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
        for i in range(0, q.shape[1], TILE):
            maximum = q.new_full((q.shape[0], TILE), -torch.inf)
            total = q.new_zeros(q.shape[0], TILE)
            accumulated = q.new_zeros(q.shape[0], TILE, q.shape[2])
            for j in range(0, k.shape[1], TILE):
                scores = q[:, i : i + TILE] @ k[:, j : j + TILE].transpose(-2, -1) * scale
                if is_causal:
                    scores = scores.masked_fill(hidden(i, i + TILE, j, j + TILE, q.device), -1e6)
                new_maximum = torch.maximum(maximum, scores.amax(-1))
                p = torch.exp(scores - new_maximum[..., None])
                correction = torch.exp(maximum - new_maximum)
                total = correction * total + p.sum(-1)
                accumulated = correction[..., None] * accumulated + p @ v[:, j : j + TILE]
                maximum = new_maximum
            output[:, i : i + TILE] = accumulated / total[..., None]
            lse[:, i : i + TILE] = maximum + torch.log(total)
        ctx.save_for_backward(q, k, v, output, lse)
        ctx.is_causal = is_causal
        return output

    backward = staticmethod(backward_pass)


def get_flashattention_autograd_function_pytorch():
    return FlashPyTorch


def get_flashattention_autograd_function_triton():
    import triton
    import triton.language as tl

    globals()["tl"] = tl  # a kernel's names are looked up in its module

    @triton.jit
    def forward_kernel(
        q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, num_queries, num_keys, scale,
        D: tl.constexpr, TILE: tl.constexpr, IS_CAUSAL: tl.constexpr,
    ):  # fmt: skip
        tile, batch = tl.program_id(0), tl.program_id(1)
        rows = tile * TILE + tl.arange(0, TILE)
        columns = tl.arange(0, TILE)
        dims = tl.arange(0, D)
        q = tl.load(q_ptr + (batch * num_queries + rows)[:, None] * D + dims[None, :])
        maximum = tl.full((TILE,), float("-inf"), tl.float32)
        total = tl.zeros((TILE,), tl.float32)
        accumulated = tl.zeros((TILE, D), tl.float32)
        for j in range(0, num_keys, TILE):
            keys = (batch * num_keys + j + columns)[:, None] * D + dims[None, :]
            k, v = tl.load(k_ptr + keys), tl.load(v_ptr + keys)
            scores = tl.dot(q, tl.trans(k)) * scale
            if IS_CAUSAL:
                scores = tl.where(rows[:, None] >= (j + columns)[None, :], scores, -1e6)
            new_maximum = tl.maximum(maximum, tl.max(scores, 1))
            p = tl.exp(scores - new_maximum[:, None])
            correction = tl.exp(maximum - new_maximum)
            total = correction * total + tl.sum(p, 1)
            accumulated = correction[:, None] * accumulated + tl.dot(p.to(v.dtype), v)
            maximum = new_maximum
        output = accumulated / total[:, None]
        tl.store(o_ptr + (batch * num_queries + rows)[:, None] * D + dims[None, :], output)
        tl.store(lse_ptr + batch * num_queries + rows, maximum + tl.log(total))

    class FlashTriton(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, is_causal=False):
            q, k, v = (x.contiguous() for x in (q, k, v))
            batch, num_queries, d = q.shape
            output = torch.empty_like(q)
            lse = torch.empty(batch, num_queries, device=q.device, dtype=torch.float32)
            forward_kernel[(num_queries // TILE, batch)](
                q,
                k,
                v,
                output,
                lse,
                num_queries,
                k.shape[1],
                1 / math.sqrt(d),
                D=d,
                TILE=TILE,
                IS_CAUSAL=is_causal,
            )
            ctx.save_for_backward(q, k, v, output, lse)
            ctx.is_causal = is_causal
            return output

        backward = staticmethod(backward_pass)

    return FlashTriton


# Data parallelism


def broadcast_from_first(module):
    for tensor in module.state_dict().values():
        dist.broadcast(tensor.detach(), src=0)


class DDP(nn.Module):
    """One all-reduce a parameter, from a hook on its gradient."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        broadcast_from_first(module)
        self.works = []
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.reduce)

    def reduce(self, parameter):
        self.works.append((dist.all_reduce(parameter.grad, async_op=True), parameter))

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self):
        for work, parameter in self.works:
            work.wait()
            parameter.grad /= dist.get_world_size()
        self.works.clear()


def get_ddp(module):
    return DDP(module)


def ddp_on_after_backward(ddp_model, optimizer):
    ddp_model.finish_gradient_synchronization()


class BucketedDDP(nn.Module):
    """One all-reduce a bucket, from the hook of its last gradient."""

    def __init__(self, module, bucket_size_mb):
        super().__init__()
        self.module = module
        broadcast_from_first(module)
        limit = math.inf if bucket_size_mb is None else bucket_size_mb * 1e6
        self.buckets, size = [[]], 0
        for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
            if self.buckets[-1] and size + parameter.nbytes > limit:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(parameter)
            size += parameter.nbytes
        self.missing = [len(bucket) for bucket in self.buckets]
        self.works = []
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(
                    lambda _, number=number: self.arrived(number)
                )

    def arrived(self, number):
        self.missing[number] -= 1
        if self.missing[number] == 0:
            bucket = self.buckets[number]
            flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
            self.works.append((dist.all_reduce(flat, async_op=True), flat, bucket))

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self):
        for work, flat, bucket in self.works:
            work.wait()
            flat /= dist.get_world_size()
            for parameter, gradient in zip(bucket, flat.split([p.numel() for p in bucket])):
                parameter.grad.copy_(gradient.view_as(parameter))
        self.works.clear()
        self.missing = [len(bucket) for bucket in self.buckets]


def get_ddp_bucketed(module, bucket_size_mb):
    return BucketedDDP(module, bucket_size_mb)


def ddp_bucketed_on_after_backward(ddp_model, optimizer):
    ddp_model.finish_gradient_synchronization()


def ddp_bucketed_on_train_batch_start(ddp_model, optimizer):
    pass


# Sharded optimizer


class ShardedOptimizer(torch.optim.Optimizer):
    """Every parameter has an owner, whose inner optimizer steps it and who then sends it to the
    others.
    """

    def __init__(self, params, optimizer_cls, **kwargs):
        self.optimizer_cls, self.kwargs = optimizer_cls, kwargs
        self.inner, self.owners = None, {}
        super().__init__(params, kwargs)

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            self.owners[parameter] = len(self.owners) % dist.get_world_size()
        own = [p for p in group["params"] if self.owners[p] == dist.get_rank()]
        if not own:
            return
        settings = {name: value for name, value in group.items() if name in self.kwargs}
        if self.inner is None:
            self.inner = self.optimizer_cls([{"params": own, **settings}], **self.kwargs)
        else:
            self.inner.add_param_group({"params": own, **settings})

    def step(self, closure=None, **kwargs):
        if self.inner is not None:
            self.inner.step(closure, **kwargs)
        for parameter, owner in self.owners.items():
            dist.broadcast(parameter.data, src=owner)


def get_sharded_optimizer(params, optimizer_cls, **kwargs):
    return ShardedOptimizer(params, optimizer_cls, **kwargs)


# FSDP


class Shard:
    """A rank's rows of one weight, and the memory that the whole weight takes while it is gathered."""

    def __init__(self, weight, compute_dtype):
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self.weight = weight
        self.rows = weight.data.chunk(num_ranks)[rank].clone()
        # Autograd's views of the whole weight share its memory, so it is freed and filled again.
        self.whole = torch.empty_like(weight.data, dtype=compute_dtype or weight.dtype)
        self.num_bytes = self.whole.nbytes
        self.gathering = None
        self.free()

    def start_gather(self):
        if self.gathering is None and self.whole.untyped_storage().nbytes() == 0:
            self.whole.untyped_storage().resize_(self.num_bytes)
            parts = list(self.whole.data.chunk(dist.get_world_size()))
            self.gathering = dist.all_gather(parts, self.rows.to(self.whole.dtype), async_op=True)

    def gather(self):
        self.start_gather()
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
        self.weight.data = self.whole

    def free(self):
        self.weight.data = self.rows
        self.whole.untyped_storage().resize_(0)


class FSDP(nn.Module):
    """Rows of each Linear's and Embedding's weight are split; it is whole while its layer computes.

    The next layer's weight is gathered meanwhile, in the forward and in the backward.
    """

    def __init__(self, module, compute_dtype=None):
        super().__init__()
        self.module = module
        broadcast_from_first(module)
        layers = [x for x in module.modules() if type(x).__name__ in ("Linear", "Embedding")]
        self.shards = {layer.weight: Shard(layer.weight, compute_dtype) for layer in layers}
        self.works = []
        shards = [self.shards[layer.weight] for layer in layers]
        for number, layer in enumerate(layers):
            own, last = shards[number], shards[max(number - 1, 0)]
            following = shards[min(number + 1, len(shards) - 1)]
            layer.register_forward_pre_hook(lambda *_, s=own, n=following: self.use(s, n))
            layer.register_forward_hook(lambda *_, s=own: s.free())
            layer.register_full_backward_pre_hook(lambda *_, s=own, n=last: self.use(s, n))
            layer.weight.register_post_accumulate_grad_hook(self.reduce)

    def use(self, shard, following):
        shard.gather()
        following.start_gather()

    def reduce(self, weight):
        gradient = weight.grad.float()
        weight.grad = None
        self.shards[weight].free()
        own = torch.empty_like(weight)
        parts = list(gradient.chunk(dist.get_world_size()))
        self.works.append((dist.reduce_scatter(own, parts, async_op=True), own, weight))

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self):
        for work, own, weight in self.works:
            work.wait()
            weight.grad = own / dist.get_world_size()
        self.works.clear()
        for parameter in self.module.parameters():
            if parameter not in self.shards and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


def get_fsdp(module, compute_dtype=None):
    return FSDP(module, compute_dtype)


def fsdp_on_after_backward(fsdp_model, optimizer):
    fsdp_model.finish_gradient_synchronization()


def fsdp_gather_full_params(fsdp_model):
    full = {}
    for name, parameter in fsdp_model.module.named_parameters():
        full[name] = parameter.data.clone()
        if parameter in fsdp_model.shards:
            parts = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, parameter.data)
            full[name] = torch.cat(parts)
    return full
