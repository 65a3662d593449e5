"""What every family of kernels is made with: arguments, tensor maps, instructions, C++ text, headers."""
