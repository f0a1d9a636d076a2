"""Stage 5: attention for Hopper (sm_90) in Gluon: warps that copy, warp groups that multiply, five-matmul backward.

In reading order: `schedule` (which tiles in what order, and the protocol between the warps, as plain Python),
`builtins` (the few instructions that Gluon does not name), `descriptors` (how TMA is told of a tensor), `walk` and
`forward`, `backward_walk`, `light` and `backward`, above head dim 128 `wide_backward`, `function` (the operators). All
but `schedule` load Triton when imported.
"""
