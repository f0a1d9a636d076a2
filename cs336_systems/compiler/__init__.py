"""Compiles kernels for a GPU that need not be there, and says what the compiler made of them."""
