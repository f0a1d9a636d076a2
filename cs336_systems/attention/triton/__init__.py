"""Stage 4: FlashAttention-2 kernels in Triton. Importing a module of this package loads Triton.

In reading order: `first` (the handout's forward, alone), `steps` (the online softmax and the recomputed backward, each
written once), `forward`, `backward` (which tiles a dense or causal program visits), `split` (parts of the keys, for few
queries), `descriptors` (which inputs Hopper's copy engine reads, and how), `block_sparse` (lists of tiles instead),
`staircase` (such lists, made in one launch), `varlen` (packed documents), `launching` (finding what is compiled, and
what runs where a configuration does not fit), `launcher` (launches that are laid out once and repeated by the driver
alone), `calls` (what of them C++ may make without Python), `function` (the operators and the autograd.Function).
"""
