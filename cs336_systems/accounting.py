"""FLOPs and bytes in closed form: attention from its exact mask area, models from their shapes.

Pure functions of the dataclasses in `config.py`; nothing is measured here. MFU, the share of a
GPU's peak, is `model_flops` over time and peak (`analysis/predictor.py`). A matmul of (m, k) by
(k, n) is 2·m·k·n FLOPs, and FLOPs of softmax, norms and other pointwise work are not counted.
Usage:

    tflops_per_s(attention_flops(shape, "backward"), ms=1.25)
    model_peak_bytes(case, "train_step") / 2**30    # expected GiB of a training step
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cs336_systems.config import (
    ATTENTION_NAMES,
    BYTES_PER_ELEMENT,
    MODES,
    SCORE_STORING_ATTENTION,
    AttentionShape,
    FieldError,
    MaskCase,
    ModelCase,
    ModelConfig,
    Precision,
)

# FLOPs per attended pair and head dimension. Forward: QKᵀ and PV, 2 each. Backward: dV, dP, dQ, dK
# and the recomputed QKᵀ, 2.5 times that, whatever a kernel executes (the convention of
# FlashAttention-2, section 4.1).
ATTENTION_FLOPS_PER_PAIR = {"forward": 4, "backward": 10, "forward_backward": 14}
# Operations of a softmax on one score, exp counted as one: maximum, subtraction, exp, addition,
# division.
SOFTMAX_FLOPS_PER_SCORE = 5
# Temporaries of the logits' size at the peak of the cross-entropy's backward; see
# `model_peak_bytes`.
LOSS_BACKWARD_COPIES = 3
# The largest temporary of an AdamW step (model/optimizer.py), unless one parameter alone is larger.
OPTIMIZER_TEMPORARY_BYTES = 256 * 2**20
OPTIMIZER_MOMENTS = 2  # of AdamW
FLOAT32_BYTES = 4
BOOL_BYTES = 1
# Implementations whose memory grows with the square of the length, by the case that they run on.
QUADRATIC = {AttentionShape: ("eager", "compiled"), MaskCase: ("eager", "tiled", "sdpa_mask")}


# Attention


def causal_area(seqlen_q: int, seqlen_k: int) -> int:
    """Return the number of attended (query, key) pairs under the top-left causal mask.

    Query i attends keys 0 to i: a triangle, and all keys for each query below the triangle.
    """
    triangle = min(seqlen_q, seqlen_k)
    return triangle * (triangle + 1) // 2 + (seqlen_q - triangle) * seqlen_k


def attention_flops(shape: AttentionShape, mode: str) -> int:
    """Return the useful FLOPs of one attention call over all heads and sequences.

    Each head and sequence takes 4 · area · head_dim in mode "forward", 2.5 times that in "backward"
    and 3.5 times in "forward_backward". The area is the number of attended pairs.
    """
    pairs = (
        causal_area(shape.seqlen_q, shape.seqlen_k)
        if shape.is_causal
        else shape.seqlen_q * shape.seqlen_k
    )
    return ATTENTION_FLOPS_PER_PAIR[mode] * pairs * shape.head_dim * shape.heads * shape.batch


def tflops_per_s(flops: float, ms: float) -> float:
    """Return the rate in TFLOP/s (10¹² FLOP/s) of `flops` FLOPs done in `ms` milliseconds.

    Raises ValueError unless `ms` is positive.
    """
    if not ms > 0:
        raise ValueError(f"ms must be positive, got {ms}")
    return flops / ms / 1e9


def attention_input_bytes(shape: AttentionShape) -> int:
    """Return the bytes of q, k and v together."""
    return _query_bytes(shape) + 2 * _key_bytes(shape)


def eager_attention_bytes(shape: AttentionShape, mode: str, *, device_kind: str = "cpu") -> int:
    """Return the predicted peak bytes of plain PyTorch attention, inputs included.

    Plain attention is matmul, scale, mask, softmax, matmul. Tensors of (batch, heads, seqlen_q,
    seqlen_k) elements in the inputs' dtype that live together at the peak:
    - forward, 2: the scores before and after scaling, or masking, or the softmax. Keeping the graph
      adds none: of the forward only the probabilities stay for backward (see `eager_graph_bytes`).
    - backward, 3: the saved probabilities, their gradient dP, and the softmax's result dS; on CUDA
      a fourth, since the softmax's backward there first writes P ∘ dP.

    A causal mask adds two (seqlen_q, seqlen_k) bool tensors, the mask and its complement, shared by
    all heads; at a peak of four copies only the complement is left. The rest is linear in the
    sequence and counted whole, an upper bound: q, k, v, O, in backward dO, dQ, dK, dV, and under
    grouped-query attention K and V (and their gradients) repeated for every query head.
    """
    copies = 2 if mode == "forward" else 4 if device_kind == "cuda" else 3
    scores = copies * _score_elements(shape) * BYTES_PER_ELEMENT[shape.dtype]
    masks = (
        (1 if copies == 4 else 2) * shape.seqlen_q * shape.seqlen_k * BOOL_BYTES
        if shape.is_causal
        else 0
    )
    linear = attention_input_bytes(shape) + _query_bytes(shape) + _repeated_key_value_bytes(shape)
    return scores + masks + (linear if mode == "forward" else 2 * linear)


def eager_graph_bytes(shape: AttentionShape) -> int:
    """Return the bytes that plain attention's forward saves for backward, besides q, k, v and O.

    They are the probabilities, the causal mask, and K and V where those are repeated for the query
    heads.
    """
    mask = shape.seqlen_q * shape.seqlen_k * BOOL_BYTES if shape.is_causal else 0
    return (
        _score_elements(shape) * BYTES_PER_ELEMENT[shape.dtype]
        + mask
        + _repeated_key_value_bytes(shape)
    )


def flash_attention_bytes(shape: AttentionShape, mode: str) -> int:
    """Return the peak bytes of FlashAttention, inputs included: linear in the sequence lengths.

    Forward: q, k, v, O and the log-sum-exp of each query. Backward adds dO, dQ, dK, dV and D =
    rowsum(dO ∘ O). The two statistics are float32 (float64 for float64 inputs). Tiles are counted
    as free.
    """
    tensors = attention_input_bytes(shape) + _query_bytes(shape)
    statistic = (
        shape.batch
        * shape.heads
        * shape.seqlen_q
        * max(FLOAT32_BYTES, BYTES_PER_ELEMENT[shape.dtype])
    )
    return tensors + statistic if mode == "forward" else 2 * (tensors + statistic)


def _query_bytes(shape: AttentionShape) -> int:
    """Return the bytes of q, and of O, which has its shape."""
    return (
        shape.batch * shape.heads * shape.seqlen_q * shape.head_dim * BYTES_PER_ELEMENT[shape.dtype]
    )


def _key_bytes(shape: AttentionShape) -> int:
    """Return the bytes of k, and of v, which has its shape."""
    kv_heads = shape.heads if shape.kv_heads is None else shape.kv_heads
    return shape.batch * kv_heads * shape.seqlen_k * shape.head_dim * BYTES_PER_ELEMENT[shape.dtype]


def _repeated_key_value_bytes(shape: AttentionShape) -> int:
    """Return the bytes of K and V repeated for every query head; 0 without grouped-query attention.

    Plain attention needs the copies.
    """
    if shape.kv_heads is None or shape.kv_heads == shape.heads:
        return 0
    return 2 * _key_bytes(shape) * shape.heads // shape.kv_heads


def _score_elements(shape: AttentionShape) -> int:
    """Return the number of scores of all heads and sequences, masked ones included."""
    return shape.batch * shape.heads * shape.seqlen_q * shape.seqlen_k


# Models: parameters and FLOPs


def num_parameters(model: ModelConfig) -> int:
    """Return the exact number of parameters: 2·V·d + L·(4d² + 3·d·d_ff + 2d) + d.

    Embedding and untied head (V·d each); a block's four attention projections (d² each), three
    SwiGLU matrices (d·d_ff each) and two RMSNorm gains (d each); the final norm's gain (d). No
    biases.
    """
    block = block_matrix_elements(model) + 2 * model.d_model
    return 2 * model.vocab_size * model.d_model + model.num_layers * block + model.d_model


def model_flops(model: ModelConfig, batch: int, mode: str) -> int:
    """Return the useful matmul FLOPs of one pass over `batch` sequences of `context_length` tokens.

    Forward: 2 for each token and each element of the block matrices and the head, plus
    4 · causal area · d_model for each layer and sequence. Attention counts the pairs of the causal
    mask, not the full square that plain attention executes, so that all implementations are held to
    the same work. The embedding is a look-up: no FLOPs.
    Backward: twice the forward (gradients of both operands of each matmul); recomputation is not
    credited. "train_step" equals "forward_backward": an optimizer has no matmuls.
    """
    tokens = batch * model.context_length
    matrices = model.num_layers * block_matrix_elements(model) + model.vocab_size * model.d_model
    area = causal_area(model.context_length, model.context_length)
    forward = 2 * tokens * matrices + 4 * area * model.d_model * batch * model.num_layers
    return forward * {"forward": 1, "backward": 2, "forward_backward": 3, "train_step": 3}[mode]


def eager_attention_part_flops(model: ModelConfig, batch: int) -> dict[str, int]:
    """Return the FLOPs that plain attention executes in one forward of all layers, by part.

    The parts are "scores", "softmax" and "values". All of them work on the whole square of scores,
    since a mask saves plain attention nothing. Scaling and masking are left out.
    """
    scores = batch * model.num_layers * model.num_heads * model.context_length**2
    matmul = 2 * scores * model.head_dim
    return {"scores": matmul, "softmax": SOFTMAX_FLOPS_PER_SCORE * scores, "values": matmul}


def block_matrix_elements(model: ModelConfig) -> int:
    """Return the number of matrix elements of a block: four attention and three SwiGLU matrices."""
    return 4 * model.d_model**2 + 3 * model.d_model * model.d_ff


# Models: memory


@dataclass(frozen=True, kw_only=True)
class RankBytes:
    """Bytes of a training step on one GPU, by what they are for."""

    parameters: int  # master weights that the rank keeps all the time
    gradients: int  # when backward is done
    optimizer: int
    activations: int  # saved for backward when it starts, or recomputed
    loss: int  # temporaries when backward starts, most of the logits' size
    gathered: int = 0  # FSDP: whole weights of the blocks in use and on their way
    # copies made only to communicate, and FSDP's whole gradients on their way to a reduction
    buffers: int = 0
    block: int = 0  # what one block saved: all that is left of the activations when backward ends
    # with buckets: gradients and buffers have their memory before backward starts, too
    gradients_stay: bool = False

    @property
    def persistent(self) -> int:
        """Return the bytes that outlive a step in which gradients are set to None."""
        return self.parameters + self.optimizer

    @property
    def peak(self) -> int:
        """Return the larger of backward's start (all activations) and its end (all gradients)."""
        start = self.activations + self.loss
        end = self.gradients + max(self.block, self.buffers)
        if self.gradients_stay:
            start += self.gradients + self.buffers
            end = self.gradients + self.buffers + self.block
        return self.persistent + self.gathered + max(start, end)

    def fits(self, memory_bytes: int, *, usable: float = 0.95) -> bool:
        """Return whether the peak is at most the share `usable` of a device's `memory_bytes`."""
        return self.peak <= usable * memory_bytes


def block_saved_bytes(
    model: ModelConfig, batch: int, *, attention: str, precision: Precision | None = None
) -> dict[str, int]:
    """Estimate the bytes that one eager Transformer block saves for backward, by tensor.

    The block is plainly written: SwiGLU is w2(silu(w1 x) · w3 x). The norms work in float32 or
    wider; everything else is in autocast's dtype, or the parameters' without autocast. Autocast
    casts the input of each linear layer anew, so that the q, k and v projections, and w1 and w3,
    keep a copy each; without autocast they share one. Autocast's softmax returns float32 on CUDA
    and is cast again for the product with V: both copies are counted (on a CPU it returns low
    precision).

    Raises ValueError for an attention whose memory is not known.
    """
    precision = Precision() if precision is None else precision
    if attention not in ATTENTION_NAMES:
        raise FieldError(
            "attention", f"must be one of {', '.join(ATTENTION_NAMES)}, got {attention!r}"
        )
    tokens = batch * model.context_length
    width, compute = tokens * model.d_model, _compute_bytes(precision)
    casts = precision.autocast is not None
    saved = {
        "norm inputs (residual stream)": 2 * width * _norm_bytes(precision),
        "normalized before the gain": 2 * width * _norm_bytes(precision),
        "norm reciprocal roots": 2 * tokens * _norm_bytes(precision),
        "inputs of the q, k, v projections": (3 if casts else 1) * width * compute,
        "rotated q, rotated k, v": 3 * width * compute,
        "input of the output projection": width * compute,
        "inputs of w1 and w3": (2 if casts else 1) * width * compute,
        "w1 x, silu(w1 x), w3 x, their product": 4 * tokens * model.d_ff * compute,
    }
    heads = batch * model.num_heads * model.context_length
    if attention in SCORE_STORING_ATTENTION:
        copies = FLOAT32_BYTES + compute if casts else compute
        saved["attention probabilities"] = heads * model.context_length * copies
        saved["causal mask"] = model.context_length**2 * BOOL_BYTES
    else:
        # a tensor of its own: its transpose is the input of the output projection
        saved["attention output by head"] = width * compute
        saved["log-sum-exp"] = heads * max(FLOAT32_BYTES, compute)
    return saved


def activation_bytes(
    model: ModelConfig, batch: int, *, attention: str, precision: Precision
) -> int:
    """Estimate all bytes that are saved between forward and backward.

    They are those of num_layers blocks, the head, and autocast's weights. The head saves the final
    norm's input, normalized input and reciprocal roots, the input of the output layer, and the
    (tokens, vocab_size) logits for the cross-entropy in float32 or wider. Autocast keeps a
    low-precision copy of every matrix but the embedding until backward is done.
    """
    blocks = model.num_layers * sum(
        block_saved_bytes(model, batch, attention=attention, precision=precision).values()
    )
    tokens = batch * model.context_length
    norm = (2 * model.d_model + 1) * tokens * _norm_bytes(precision)
    head = (
        norm
        + tokens * model.d_model * _compute_bytes(precision)
        + loss_logit_bytes(model, batch, precision)
    )
    return blocks + head + _weight_copy_bytes(model, precision)


def model_peak_bytes(case: ModelCase, mode: str) -> int:
    """Estimate the peak bytes of one pass over `case` in `mode`, parameters included.

    "train_step" includes AdamW's state. To these the largest of the pass's phases is added:
    - forward, without a graph: the residual stream plus the largest of attention (its inputs, and
      two copies of the scores where it stores them), feed-forward (three hidden tensors) and the
      logits. Autocast on CUDA holds, besides the scores, softmax's input and output in float32, and
      its copies of the weights during the whole pass.
    - start of backward: all activations plus either three temporaries of the logits' size (logits
      minus log-sum-exp, its exponential, the gradient) or, in the last block, two gradients of the
      scores.
    - end of backward and optimizer step: all gradients plus one block's activations, or the
      optimizer's temporary, the size of a batch of parameters.

    Between these ends memory moves linearly: each block frees its activations and makes its
    gradients. Gradients are taken as None when backward starts.
    """
    model, batch, precision = case.model, case.batch, case.precision
    # autocast leaves the parameters in their dtype
    parameters = num_parameters(model) * BYTES_PER_ELEMENT[precision.parameters]
    saved = block_saved_bytes(model, batch, attention=case.attention, precision=precision)
    compute, stores_scores = _compute_bytes(precision), case.attention in SCORE_STORING_ATTENTION
    width = batch * model.context_length * model.d_model
    two_scores = (
        2 * batch * model.num_heads * model.context_length**2 * compute if stores_scores else 0
    )

    if mode == "forward":
        # Autocast's softmax on CUDA holds its input and its output in float32.
        if stores_scores and precision.autocast is not None:
            two_scores = (
                batch * model.num_heads * model.context_length**2 * (compute + 2 * FLOAT32_BYTES)
            )
        attention = 5 * width * compute + two_scores
        feed_forward = (width + 3 * batch * model.context_length * model.d_ff) * compute
        logits = batch * model.context_length * (model.d_model + model.vocab_size) * compute
        stream = width * _norm_bytes(precision)
        return (
            parameters
            + _weight_copy_bytes(model, precision)
            + stream
            + max(attention, feed_forward, logits)
        )

    # Start and end of backward, and the optimizer step
    largest_parameter = (
        model.d_model * max(model.vocab_size, model.d_ff) * BYTES_PER_ELEMENT[precision.parameters]
    )
    batch_of_parameters = min(parameters, max(OPTIMIZER_TEMPORARY_BYTES, largest_parameter))
    trains = mode == "train_step"
    return RankBytes(
        parameters=parameters,
        gradients=parameters,
        optimizer=OPTIMIZER_MOMENTS * parameters if trains else 0,
        activations=activation_bytes(model, batch, attention=case.attention, precision=precision),
        loss=max(LOSS_BACKWARD_COPIES * loss_logit_bytes(model, batch, precision), two_scores),
        block=max(sum(saved.values()), batch_of_parameters if trains else 0),
    ).peak


def _weight_copy_bytes(model: ModelConfig, precision: Precision) -> int:
    """Return the bytes of autocast's copies of all matrices but the embedding, 0 without it."""
    matrices = model.num_layers * block_matrix_elements(model) + model.vocab_size * model.d_model
    return matrices * _compute_bytes(precision) if precision.autocast is not None else 0


def _compute_bytes(precision: Precision) -> int:
    """Return the bytes of an element in the matmuls' dtype."""
    return BYTES_PER_ELEMENT[precision.autocast or precision.parameters]


def _norm_bytes(precision: Precision) -> int:
    """Return the bytes of an element inside a norm, which works in float32 or wider."""
    return max(FLOAT32_BYTES, BYTES_PER_ELEMENT[precision.parameters])


def loss_logit_bytes(model: ModelConfig, batch: int, precision: Precision) -> int:
    """Return the bytes of the logits as the cross-entropy takes them, in float32 or wider."""
    return (
        batch
        * model.context_length
        * model.vocab_size
        * max(FLOAT32_BYTES, _compute_bytes(precision))
    )


# Cases of any kind


def predicted_peak_bytes(case: Any, implementation: str, modes: Iterable[str]) -> int:
    """Return the predicted peak bytes of `implementation` on `case`; 0 where no prediction exists.

    The prediction is for the largest of `modes`, in the order of MODES. A case of another kind than
    attention, masks and models may bring its own as `predicted_bytes`.
    """
    if isinstance(case, ModelCase):
        return (
            0
            if implementation == "simulated"
            else model_peak_bytes(case, max(modes, key=MODES.index))
        )
    if implementation in QUADRATIC.get(type(case), ()):
        shape = case.shape if isinstance(case, MaskCase) else case
        return eager_attention_bytes(shape, max(modes, key=MODES.index))
    # an implementation of the user's own, "package.module:name", has no prediction
    if isinstance(case, AttentionShape) and ":" not in implementation:
        return flash_attention_bytes(case, max(modes, key=MODES.index))
    return int(getattr(case, "predicted_bytes", 0))
