"""Fused kernels, each equal to a function of decoding/ in plain torch. They know tensors only."""
