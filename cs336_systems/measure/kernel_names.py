"""What a kernel is by its name: its category, and a name that fits a table.

    categorize("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT")    # "gemm"
    short_name("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, "
               "at::native::MeanOps<...>>>(...)")              # "reduce MeanOps"

Names are those of GPU kernels (cuBLAS, CUTLASS, cuDNN, FlashAttention, ATen, Triton as Inductor
names it, NCCL) and, where there is no GPU, those of the profiler's CPU operators. The rules are
read in order and the first match counts. A name that none matches is `other`, which tables show, so
that a new library's kernels are seen and not miscounted.
"""

import re
from functools import lru_cache

CATEGORIES = (
    "gemm",
    "attention",
    "softmax",
    "elementwise",
    "reduction",
    "copy",
    "communication",
    "optimizer",
    "other",
)

_RULES: tuple[tuple[str, str], ...] = (
    (
        "communication",
        r"nccl|c10d::|gloo|all_?reduce|all_?gather|reduce_?scatter|^ms_|one_shot|two_shot|nvshmem",
    ),
    # Fused attention before gemm: cuDNN's and CUTLASS's attention kernels name their matmuls, too.
    (
        "attention",
        r"fmha|flash_?(fwd|bwd|attention|attn)|(flash|hopper)_(split_)?(forward|backward)"
        r"|flash_merge|flash::|varlen_(forward|dkdv|dq)_kernel"
        r"|sdpa|scaled_dot_product|flex_(attention|decoding)"
        r"|attention_(forward|backward|fwd|bwd)|(tiled|triton|hopper)_attention",
    ),
    ("optimizer", r"multi_tensor_apply|adam|_fused_sgd|_foreach_|optimizer"),
    ("softmax", r"softmax|logsumexp|nll_loss|cross_entropy"),
    (
        "copy",
        r"memcpy|memset|copy|catarray|fillfunctor"
        r"|^aten::(cat|stack|clone|contiguous|to|zero_|fill_|zeros|ones|index\w*|gather|scatter\w*"
        r"|embedding\w*|select_backward|slice_backward|pad|repeat|tril|triu)$"
        r"|index(_select|select|_put|_elementwise|ing)|gather|scatter|embedding"
        r"|(?<!aten::)(?:transpose|permute)|triu_tril|where_kernel|tril",
    ),
    (
        "gemm",
        r"gemm|gemv|nvjet|cutlass|xmma|wgmma|cublas|splitk|triton_tem_|matmul|addmm|\bdot_kernel"
        r"|^aten::(mm|bmm|baddbmm|linear|einsum|dot|mv|addmv)$",
    ),
    (
        "reduction",
        r"reduce|triton_(red|per)_|layer_?norm|rms_?norm|\bnorm|welford|cunn_.*norm"
        r"|^aten::(sum|mean|norm|max|min|amax|amin|aminmax|argmax|argmin|var|std|prod|cumsum"
        r"|any|all|linalg_\w+)$",
    ),
    (
        "elementwise",
        r"elementwise|triton_poi_|functor|distribution_"
        r"|^aten::(add|sub|rsub|mul|div|pow|exp|log|sqrt|rsqrt|neg|abs|sigmoid|silu|gelu|relu|tanh"
        r"|sin|cos|square|reciprocal|where|masked_fill|clamp|maximum|minimum|lerp|addcmul|addcdiv"
        r"|bitwise_\w+|logical_\w+|eq|ne|lt|le|gt|ge|isfinite|isnan|dropout|native_dropout|arange"
        r"|threshold)(_backward)?_?$",
    ),
)
RULES = tuple((category, re.compile(pattern, re.IGNORECASE)) for category, pattern in _RULES)

LONGEST_NAME = 72  # characters of a name in a table
# The part of an ATen kernel's template arguments that says what it computes.
FUNCTOR = re.compile(
    r"(?:CUDAFunctorOnSelf|CUDAFunctorOnOther|CUDAFunctor|BinaryFunctor|BUnaryFunctor"
    r"|AUnaryFunctor)_?(\w*)|(\w+Functor)\b"
    r"|(\w+_kernel_cuda)\b|(\w+Ops)\b|(\w*[a-z]_kernel)(?:_impl)?\("
)
# Templates around a functor, whose names do not tell what it computes.
_WRAPPERS = (
    "BinaryFunctor",
    "AUnaryFunctor",
    "BUnaryFunctor",
    "elementwise_kernel",
    "vectorized_elementwise_kernel",
)
_NOISE = re.compile(
    r"\(anonymous namespace\)::|<unnamed>::|at::native::|at_cuda_detail::|c10::|cutlass::"
    r"|^void |^static "
)


# Cached: a trace has many thousands of events and some dozens of names.
@lru_cache(maxsize=8192)
def categorize(name: str) -> str:
    """Return the category of the kernel or operator `name`, one of `CATEGORIES`."""
    return next((category for category, pattern in RULES if pattern.search(name)), "other")


@lru_cache(maxsize=8192)
def short_name(name: str) -> str:
    """Return `name` without namespaces and arguments, but with the functor that tells it apart.

    At most LONGEST_NAME characters.
    """
    bare = _NOISE.sub("", name).strip()
    head = re.split(r"[<(]", bare, maxsplit=1)[0].strip() or bare
    if "<" in name:
        detail = _functor(name, head)
        inner = re.search(r"Kernel2?<(\w+)", bare)  # CUTLASS: the kernel is the template's argument
        if inner is not None and head.startswith("Kernel"):
            head = inner[1]
        head = head.removesuffix("_kernel") + (f" {detail}" if detail else "")
    return head if len(head) <= LONGEST_NAME else head[: LONGEST_NAME - 1] + "…"


def _functor(name: str, head: str) -> str:
    """Return what an ATen kernel's template computes: `MulFunctor`, `direct_copy`, `MeanOps`.

    Empty if the template does not say. `head` is the kernel's name before the template.
    """
    groups = (
        group
        for match in FUNCTOR.finditer(name.partition("<")[2])
        for group in match.groups()
        if group
    )
    named = (
        group
        for group in groups
        if group not in (*_WRAPPERS, head) and not group.startswith("gpu_kernel")
    )
    return next(named, "").removesuffix("_kernel_cuda").removesuffix("_kernel")
