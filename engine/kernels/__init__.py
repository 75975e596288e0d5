"""What layers and attention compute with: C++ for CPUs, Triton for GPUs, and traces of operators."""
