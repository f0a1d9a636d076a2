"""Stage 4: FlashAttention-2 kernels in Triton. Importing a module of this package loads Triton.

In reading order: `first` (the handout's kernel, alone), `steps` (the online softmax and the
recomputed backward, each written once), `forward`, `backward` (which tiles a program visits),
`lists` (the tiles of a block mask, visited instead), `split` (parts of the keys, for few queries),
`staircase` (lists made in one launch), `documents` (packed ones), `launch` (what a kernel is given,
and every launch), `passes` (the operators and the autograd.Function).
"""
