"""Attention for Hopper GPUs (sm_90) in Gluon: warps that copy, warps that compute, barriers between them."""
