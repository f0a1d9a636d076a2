"""Stage 5: attention for Hopper (sm_90) in Gluon: warps that copy, warp groups that multiply,
five-matmul backward.

In reading order: `schedule` (which tiles in what order, as plain Python), `builtins` (the few
instructions that Gluon does not name), `columns` (matmuls over 96 of them), `descriptors` (how TMA
is told of a tensor), `walk` and `forward`, `backward_walk`, `division`, `light` and `backward`,
above head dim 128 `wide_backward`, `entry` (the operators); `reports` says what the compiler made
of them. All but `schedule`, `division` and `reports` load Triton when imported.
"""
