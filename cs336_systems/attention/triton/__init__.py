"""Stage 4: FlashAttention-2 kernels in Triton. Importing a module of this package loads Triton."""
