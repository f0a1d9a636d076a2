"""Stage 5: attention for Hopper (sm_90) in Gluon, by warps that copy and warp groups that compute.

The backward has five matmuls; above head dim 128 it is `wide_backward`, of seven. In reading order:
`schedule` (which tiles in what order, as plain Python), `builtins` (the few instructions that Gluon
does not name), `columns` (matmuls over 96 columns), `descriptors` (how TMA is told of a tensor),
`walk` and `forward`, then `backward_walk`, `division`, `light` and `backward`, `wide_backward`, and
`entry` (the operators). `cs336_systems.compiler.hopper_reports` says what the compiler made of the
kernels. All but `schedule` and `division` load Triton when imported.
"""
